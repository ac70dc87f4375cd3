// The symbols that the shared library exports and imports.
#include <gtest/gtest.h>

#include <cctype>
#include <cstdio>
#include <fstream>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace {

// The lines that a program prints about a file.
std::vector<std::string> lines(const std::string& program,
                               const std::string& file = TE_ATTENTION_LIBRARY) {
  const std::string command = program + " " + file;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  std::vector<std::string> found;
  char line[4096];
  while (pipe && std::fgets(line, sizeof(line), pipe.get())) found.emplace_back(line);
  EXPECT_FALSE(found.empty()) << command;
  return found;
}

// The names that a public header calls or declares as functions: a word and "(" after it.
std::set<std::string> functions(const std::string& header, const std::string& prefix) {
  std::ifstream file(std::string(TE_ATTENTION_SOURCE_DIR) + "/include/" + header);
  std::set<std::string> found;
  std::string text;
  for (char c; file.get(c);) {
    if (std::isalnum(static_cast<unsigned char>(c)) || c == '_') {
      text += c;
      continue;
    }
    if (c == '(' && text.starts_with(prefix)) found.insert(text);
    text.clear();
  }
  EXPECT_FALSE(found.empty()) << header;
  return found;
}

bool matches(const std::string& line, const char* pattern) {
  return testing::Matcher<std::string>(testing::ContainsRegex(pattern)).Matches(line);
}

TEST(Symbols, OnlyOurNamesAreExported) {
  for (const std::string& line : lines(TE_ATTENTION_NM " -D -C --defined-only"))
    EXPECT_TRUE(matches(line, " T (tea_|nvte_|transformer_engine::)")) << line;
}

TEST(Symbols, EveryDeclaredFunctionIsExported) {
  std::set<std::string> exported;
  for (const std::string& line : lines(TE_ATTENTION_NM " -D --defined-only"))
    exported.insert(line.substr(line.rfind(' ') + 1, line.find('\n') - line.rfind(' ') - 1));
  for (const auto& [header, prefix] :
       {std::pair{"te_attention.h", "tea_"}, std::pair{"te_attention_ops.h", "tea_"},
        std::pair{"te_attention_cp.h", "tea_"}, std::pair{"transformer_engine/softmax.h", "nvte_"},
        std::pair{"transformer_engine/fused_attn.h", "nvte_"},
        std::pair{"transformer_engine/transformer_engine.h", "nvte_"}})
    for (const std::string& name : functions(header, prefix))
      EXPECT_TRUE(exported.contains(name)) << name << " of " << header;
}

// Whatever is bound by name at load time can be taken by another library; ours never is.
TEST(Symbols, OursAreNeverBoundByName) {
  for (const std::string& line : lines(TE_ATTENTION_READELF " -rWC"))
    EXPECT_FALSE(matches(line, "tea_|nvte_|transformer_engine|tea::")) << line;
}

// The linker resolves such a call to ours; this keeps it so in a static build, too.
TEST(Symbols, NoCodeInsideUsesAnNvteName) {
  for (const char* archive : {TE_ATTENTION_INSIDE, TE_ATTENTION_CORE})
    for (const std::string& line : lines(TE_ATTENTION_READELF " -rW", archive))
      EXPECT_FALSE(matches(line, " nvte_[a-z]")) << line;
}

TEST(Symbols, AllOthersComeFromTheSystem) {
#ifdef TE_ATTENTION_SANITIZE
  GTEST_SKIP() << "a sanitizer brings a library that no user's build has";
#endif
  for (const std::string& line : lines(TE_ATTENTION_NM " -D --undefined-only"))
    EXPECT_TRUE(matches(line, " U \\S+@(GLIBC|GLIBCXX|CXXABI|GCC)_[0-9.]+\\s*$| w ")) << line;
  for (const std::string& line : lines(TE_ATTENTION_READELF " -dW")) {
    if (!matches(line, "NEEDED")) continue;
    EXPECT_TRUE(
        matches(line, "\\[(libstdc\\+\\+|libm|libgcc_s|libc|libpthread|libdl|ld-linux)[.-]"))
        << line;
  }
}

}  // namespace
