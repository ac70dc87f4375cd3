// bench: starts a suite of bench/ with the library in the folder of this program.
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <vector>

#include "commands.h"
#include "core/error.h"

namespace tea::tool {
namespace {

namespace fs = std::filesystem;

struct Suite {
  std::string_view name, program;
  bool chooses_engines;  // takes --engines
  std::vector<std::string> more = {};
};
const Suite kSuites[] = {
    {"mha-16k", "gpu_vs_torch.py", true},
    {"cudnn", "gpu_vs_torch.py", false, {"--engines", "cudnn", "--peers", "cudnn"}},
    {"models", "gpu_models.py", true},
    {"fp8", "gpu_fp8.py", true},
    {"cpu", "cpu_vs_torch.py", false},
    {"front-end", "torch_front_end.py", false},
};

const Suite& suite_of(const std::string& name) {
  std::string known;
  for (const Suite& suite : kSuites) {
    if (suite.name == name) return suite;
    known += (known.empty() ? "" : ", ") + std::string(suite.name);
  }
  refuse_argument("SUITE", "\"" + name + "\"", "one of " + known);
}

// Of the build that this program belongs to, or of what was installed with it.
fs::path library() {
  const fs::path here = fs::read_symlink("/proc/self/exe").parent_path();
  for (const char* folder : {".", "../" TE_ATTENTION_LIBDIR})
    if (const fs::path found = here / folder / "libte_attention.so"; fs::exists(found))
      return found.lexically_normal();
  throw Error(TEA_FAILED, "libte_attention.so is not in the folder of " + here.string() +
                              "/te-attn; build the target te_attention");
}

}  // namespace

int bench(const Options& options) {
  const Suite& suite = suite_of(options.argument);
  const fs::path program = fs::path(TE_ATTENTION_BENCH) / suite.program;
  if (!fs::exists(program))
    throw Error(TEA_FAILED, program.string() + " is missing: suites run from a clone");
  TEA_REQUIRE(options.engine.empty() || suite.chooses_engines, "--engine", options.engine,
              "none: suite " + options.argument + " has its own");
  const char* const chosen = std::getenv("PYTHON");
  std::vector<std::string> words = {chosen ? chosen : "python3", program, "--library", library()};
  words.insert(words.end(), suite.more.begin(), suite.more.end());
  if (!options.engine.empty()) words.insert(words.end(), {"--engines", options.engine});
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  execvp(arguments[0], arguments.data());
  throw Error(TEA_FAILED, words[0] + ": " + std::strerror(errno));
}

}  // namespace tea::tool
