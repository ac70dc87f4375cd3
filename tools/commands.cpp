// info, explain, check and fuzz.
#include "commands.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <mutex>
#include <thread>

#include "core/env.h"
#include "core/error.h"
#include "core/registry.h"
#include "json.h"
#include "kit/check.h"
#include "kit/draw.h"

namespace tea::tool {
namespace {

struct Cpu {
  std::string name = "unknown";
  std::vector<std::string> features;
};

// What the CPU engine chooses its instruction set by.
Cpu cpu() {
  Cpu out;
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(": ");
    if (colon == line.npos) continue;
    if (line.starts_with("model name")) out.name = line.substr(colon + 2);
    if (!line.starts_with("flags")) continue;
    for (const char* feature : {"fma", "avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile",
                                "amx_bf16", "amx_fp16"})
      if ((line + " ").find(" " + std::string(feature) + " ") != line.npos)
        out.features.push_back(feature);
    break;
  }
  return out;
}

std::vector<std::string> quoted(const std::vector<std::string>& list) {
  std::vector<std::string> out;
  for (const std::string& item : list) out.push_back(json::text(item));
  return out;
}

std::string settings_json() {
  std::vector<std::string> rows;
  for (const SettingRow& row : settings())
    rows.push_back(json::object({{"variable", json::text(row.variable)},
                                 {"alias", row.alias ? json::text(row.alias) : "null"},
                                 {"value", json::text(setting(row.setting))},
                                 {"meaning", json::text(row.meaning)}}));
  return json::array(rows);
}

void print_settings() {
  std::printf("settings (environment)\n");
  for (const SettingRow& row : settings()) {
    const std::string& value = setting(row.setting);
    const std::string alias =
        row.alias ? " (or " + std::string(row.alias) + "=" + row.alias_means + ")" : "";
    std::printf("  %s=%s%s\n      %s\n", row.variable, value.c_str(), alias.c_str(),
                std::string(row.meaning).c_str());
  }
}

std::string report_json(const kit::Report& report) {
  std::vector<std::string> tensors;
  for (const kit::Closeness& c : report.tensors)
    tensors.push_back(json::object({{"name", json::text(c.tensor)},
                                    {"elements", json::number(static_cast<uint64_t>(c.elements))},
                                    {"worst", json::number(c.ratio)}}));
  return json::object({{"case", json::text(report.line)},
                       {"engine", json::text(report.engine)},
                       {"ok", json::boolean(report.ok())},
                       {"tensors", json::array(tensors)},
                       {"failures", json::array(quoted(report.failures))}});
}

void print_report(const kit::Report& report) {
  std::printf("%s: %s\n", report.engine.c_str(), report.ok() ? "agrees with the oracle" : "WRONG");
  for (const kit::Closeness& c : report.tensors)
    std::printf("  %-9s worst error %9.4g of 2 bounds over %lld elements\n", c.tensor.c_str(),
                c.ratio, static_cast<long long>(c.elements));
  if (!report.ok()) std::printf("%s", report.text().c_str());
}

uint64_t count_of(const std::string& text) {
  const bool digits = !text.empty() && text.find_first_not_of("0123456789") == text.npos;
  TEA_REQUIRE(digits && text.size() < 19, "COUNT", "\"" + text + "\"", "a number of cases");
  return std::stoull(text);
}

}  // namespace

int info(const Options& options) {
  const Cpu processor = cpu();
  const auto threads = static_cast<uint64_t>(std::thread::hardware_concurrency());
  std::vector<std::string> names;
  for (const Engine& engine : engines())
    names.push_back(std::string(engine.name) + (engine.only_by_name ? " (only by name)" : ""));
  if (options.json) {
    const std::string processor_json =
        json::object({{"name", json::text(processor.name)},
                      {"threads", json::number(threads)},
                      {"features", json::array(quoted(processor.features))}});
    std::printf("%s\n", json::object({{"version", json::text(tea_version())},
                                      {"engines", json::array(quoted(names))},
                                      {"cpu", processor_json},
                                      {"settings", settings_json()}})
                            .c_str());
    return 0;
  }
  std::printf("te-attention %s\nengines, in order of preference\n", tea_version());
  for (const std::string& name : names) std::printf("  %s\n", name.c_str());
  std::printf("cpu\n  %s, %llu threads\n ", processor.name.c_str(),
              static_cast<unsigned long long>(threads));
  for (const std::string& feature : processor.features) std::printf(" %s", feature.c_str());
  std::printf("\n");
  print_settings();
  return 0;
}

int explain(const Options& options) {
  const Problem problem = Problem::parse(options.argument);
  size_t needed = 0;
  tea_status status = tea_explain(&problem, options.device, nullptr, 0, &needed);
  std::string text(needed, '\0');
  if (status == TEA_OK)
    status = tea_explain(&problem, options.device, text.data(), text.size(), &needed);
  if (status != TEA_OK) throw Error(status, tea_error());
  text.resize(needed ? needed - 1 : 0);
  tea_plan* plan = nullptr;
  const bool runs = tea_plan_create(&problem, options.device, options.engine.c_str(), &plan) == 0;
  const std::string engine = runs ? tea_plan_engine(plan) : "";
  tea_plan_release(plan);
  if (options.json)
    std::printf("%s\n", json::object({{"problem", json::text(problem.text())},
                                      {"engine", runs ? json::text(engine) : "null"},
                                      {"explanation", json::text(text)}})
                            .c_str());
  else
    std::printf("%s", text.c_str());
  return runs ? 0 : 1;
}

int check(const Options& options) {
  const kit::Case c = kit::Case::parse(options.argument);
  c.problem.check();
  const kit::Report report = kit::check(c, options.engine);
  if (options.json)
    std::printf("%s\n", report_json(report).c_str());
  else
    print_report(report);
  return report.ok() ? 0 : 1;
}

int fuzz(const Options& options) {
  const uint64_t count = count_of(options.argument);
  std::atomic<uint64_t> next{0}, failed{0};
  std::mutex mutex;
  const auto work = [&] {
    for (uint64_t i; (i = next++) < count;) {
      const kit::Report report = kit::check(kit::draw(options.first + i), options.engine);
      if (report.ok()) continue;
      ++failed;
      const std::lock_guard lock(mutex);
      if (options.json)
        std::printf("%s\n", report_json(report).c_str());
      else
        std::printf("seed %llu\n%s", static_cast<unsigned long long>(options.first + i),
                    report.text().c_str());
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::max(std::thread::hardware_concurrency(), 1u); ++i)
    threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (options.json)
    std::printf("%s\n", json::object({{"cases", json::number(count)},
                                      {"failed", json::number(failed.load())}})
                            .c_str());
  else
    std::printf("%llu of %llu cases failed\n", static_cast<unsigned long long>(failed.load()),
                static_cast<unsigned long long>(count));
  return failed ? 1 : 0;
}

}  // namespace tea::tool
