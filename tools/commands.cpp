// info, explain, check and fuzz.
#include "commands.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <fstream>
#include <functional>
#include <iostream>
#include <mutex>
#include <thread>

#include "core/driver.h"
#include "core/env.h"
#include "core/error.h"
#include "core/registry.h"
#include "json.h"
#include "kit/check.h"
#include "kit/draw.h"
#include "progress.h"

namespace tea::tool {
namespace {

struct Cpu {
  std::string name = "unknown";
  std::vector<std::string> features;
};

// The features by which the CPU engine selects its instruction set.
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
  const char* verdict = report.ok()      ? "agrees with the oracle"
                        : report.refused ? "refused"
                                         : "WRONG";
  std::printf("%s: %s\n", report.engine.empty() ? "any engine" : report.engine.c_str(), verdict);
  for (const kit::Closeness& c : report.tensors)
    std::printf("  %-9s worst error %9.4g of 2 bounds over %lld elements\n", c.tensor.c_str(),
                c.ratio, static_cast<long long>(c.elements));
  if (!report.ok()) std::printf("%s", report.text().c_str());
}

uint64_t count_of(const Options& options) {
  const std::string& text = options.argument;
  TEA_REQUIRE(text.empty() != (options.count == 0), "COUNT",
              text.empty() ? "missing" : "given twice",
              "a number of cases after fuzz, or --count with it");
  if (text.empty()) return options.count;
  const bool digits = text.find_first_not_of("0123456789") == text.npos;
  TEA_REQUIRE(digits && text.size() < 19, "COUNT", "\"" + text + "\"", "a number of cases");
  return std::stoull(text);
}

std::vector<std::string> gpu_texts() {
  std::vector<std::string> out;
  for (const Device& gpu : driver::gpus().list)
    out.push_back(shown(gpu.index) + ": sm_" + shown(gpu.sm) + ", " + shown(gpu.num_sms) +
                  " SMs, " + shown(gpu.shared_bytes >> 10) + " KiB shared memory");
  return out;
}

// The command that checks one random case again, where it was checked.
std::string replay_of(uint64_t seed, const Options& options) {
  std::string command = "te-attn check --replay " + shown(seed);
  if (!options.draws.empty()) command += " " + options.draws;
  if (!options.engine.empty()) command += " --engine " + options.engine;
  if (options.device != kHost) command += " --device " + shown(options.device);
  return command;
}

struct Draws {
  std::string_view option;
  kit::Case (*draw)(uint64_t seed);
};
constexpr Draws kDraws[] = {
    {"", kit::draw},
    {"--parts", kit::draw_part},
    {"--decoding", kit::draw_decoding},
    {"--prefill", kit::draw_prefill},
    {"--training", kit::draw_training},
};

kit::Case drawn(uint64_t seed, const Options& options) {
  return std::ranges::find(kDraws, options.draws, &Draws::option)->draw(seed);
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
                                      {"gpus", json::array(quoted(gpu_texts()))},
                                      {"settings", settings_json()}})
                            .c_str());
    return 0;
  }
  std::printf("te-attention %s\nengines, in order of preference\n", tea_version());
  for (const std::string& name : names) std::printf("  %s\n", name.c_str());
  std::printf("cpu\n  %s, %llu threads\n ", processor.name.c_str(),
              static_cast<unsigned long long>(threads));
  for (const std::string& feature : processor.features) std::printf(" %s", feature.c_str());
  std::printf("\ngpus\n");
  for (const std::string& text : gpu_texts()) std::printf("  %s\n", text.c_str());
  if (driver::gpus().list.empty()) std::printf("  none: %s\n", driver::gpus().why_none.c_str());
  print_settings();
  return 0;
}

namespace {

// Whether any engine runs it.
bool explain_one(const std::string& line, const Options& options) {
  const Problem problem = Problem::parse(line);
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
  return runs;
}

}  // namespace

int explain(const Options& options) {
  if (options.argument != "-") return explain_one(options.argument, options) ? 0 : 1;
  bool all = true;
  for (std::string line; std::getline(std::cin, line);) {
    all &= explain_one(line, options);
    if (!options.json) std::printf("\n");
  }
  return all ? 0 : 1;
}

namespace {

// A case and what it is called where it fails.
struct Named {
  kit::Case test;
  std::string name;
};

// Cases by the engine that was asked for, on all cores. What no engine of the device takes on is
// counted by itself; only what no GPU takes on may be, unless the engine was named.
int check_all(uint64_t count, const std::function<Named(uint64_t)>& one, const Options& options) {
  Progress progress(count);
  std::atomic<uint64_t> next{0}, done{0}, failed{0}, refused{0};
  std::atomic<bool> lost{false};
  std::mutex mutex;
  const auto print = [&](const std::string& name, const kit::Report& report) {
    const std::lock_guard lock(mutex);
    if (options.json)
      std::printf("%s\n", report_json(report).c_str());
    else
      std::printf("%s\n%s", name.c_str(), report.text().c_str());
    std::fflush(stdout);
  };
  const auto work = [&] {
    for (uint64_t i; !lost && (i = next++) < count;) {
      const Named c = one(i);
      const kit::Report report = kit::check(c.test, options.engine, {options.device});
      const bool may_refuse = options.device != kHost &&
                              (!options.engine.empty() || !kit::runs_on_gpus(c.test.problem));
      if (report.refused && may_refuse) {
        ++refused;
      } else if (!report.ok()) {
        ++failed;
        if (report.lost) lost = true;
        print(c.name, report);
      }
      progress.at(++done, failed, refused);
    }
  };
  std::vector<std::thread> threads;
  for (unsigned i = 1; i < std::max(std::thread::hardware_concurrency(), 1u); ++i)
    threads.emplace_back(work);
  work();
  for (std::thread& thread : threads) thread.join();
  if (options.json)
    std::printf("%s\n", json::object({{"cases", json::number(done.load())},
                                      {"failed", json::number(failed.load())},
                                      {"refused", json::number(refused.load())}})
                            .c_str());
  else
    std::printf("%llu of %llu cases failed, %llu refused\n",
                static_cast<unsigned long long>(failed.load()),
                static_cast<unsigned long long>(done.load()),
                static_cast<unsigned long long>(refused.load()));
  return failed ? 1 : 0;
}

// A case a line, as in tests/problems.
int check_lines(const Options& options) {
  std::vector<Named> cases;
  for (const kit::Line& line : kit::read_lines("/dev/stdin")) {
    cases.push_back({kit::Case::parse(line.text), "line " + shown(line.number)});
    cases.back().test.problem.check();
  }
  TEA_REQUIRE(!cases.empty(), "CASE", "-, and no line has one", "a case a line on standard input");
  return check_all(
      cases.size(), [&](uint64_t i) { return cases[i]; }, options);
}

}  // namespace

int check(const Options& options) {
  const bool replays = options.replay.has_value();
  TEA_REQUIRE(replays == options.argument.empty(), "CASE", replays ? "given twice" : "missing",
              "a case in words, or --replay with its seed");
  if (options.argument == "-") return check_lines(options);
  const kit::Case c =
      replays ? drawn(*options.replay, options) : kit::Case::parse(options.argument);
  c.problem.check();
  const kit::Report report = kit::check(c, options.engine, {options.device});
  if (options.json)
    std::printf("%s\n", report_json(report).c_str());
  else
    print_report(report);
  return report.ok() ? 0 : 1;
}

int fuzz(const Options& options) {
  const auto one = [&](uint64_t i) {
    const uint64_t seed = options.seed + i;
    return Named{drawn(seed, options),
                 "seed " + shown(seed) + " (" + replay_of(seed, options) + ")"};
  };
  return check_all(count_of(options), one, options);
}

}  // namespace tea::tool
