// The command line tool, run as a user runs it.
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "kit/draw.h"

namespace {

constexpr const char* kProblem =
    "dtype=bf16 training=1 heads_q=4 heads_kv=2 dim_qk=16 batch=2 seqlen_q=5 seqlen_kv=7";

struct Outcome {
  int code;
  std::string out, err;
};

std::string read_all(const std::string& command, int* code) {
  std::string out;
  std::FILE* pipe = popen(command.c_str(), "r");
  std::array<char, 4096> buffer;
  while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe))
    out.append(buffer.data(), n);
  const int status = pclose(pipe);
  *code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return out;
}

// `arguments` as one would type them in a shell.
Outcome te_attn(const std::string& arguments) {
  const std::string command = "'" TE_ATTN "' " + arguments;
  Outcome o;
  o.out = read_all(command + " 2>/dev/null", &o.code);
  int again = 0;
  o.err = read_all(command + " 2>&1 >/dev/null", &again);
  EXPECT_EQ(again, o.code);
  return o;
}

std::string quoted(const std::string& s) { return "\"" + s + "\""; }

bool holds(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(TeAttn, InfoNamesVersionEnginesAndSettings) {
  const Outcome human = te_attn("info"), machine = te_attn("info --json");
  EXPECT_EQ(human.code, 0);
  EXPECT_EQ(machine.code, 0);
  for (const char* part : {"0.1.0", "reference", "TE_ATTENTION_ENGINE", "NVTE_DEBUG"}) {
    EXPECT_TRUE(holds(human.out, part)) << human.out;
    EXPECT_TRUE(holds(machine.out, part)) << machine.out;
  }
  EXPECT_EQ(machine.out.front(), '{');
  EXPECT_EQ(human.err, "");
}

TEST(TeAttn, ExplainNamesTheEngine) {
  const Outcome human = te_attn("explain " + quoted(kProblem));
  EXPECT_EQ(human.code, 0);
  EXPECT_TRUE(holds(human.out, "reference")) << human.out;
  const Outcome machine = te_attn("explain --json " + quoted(kProblem));
  EXPECT_TRUE(holds(machine.out, "\"explanation\"")) << machine.out;
  EXPECT_TRUE(holds(machine.out, kProblem)) << machine.out;
}

TEST(TeAttn, ExplainTakesALineEach) {
  const std::string lines = testing::TempDir() + "te_attn_lines.txt";
  std::ofstream(lines) << kProblem << "\n" << kProblem << "\n";
  const Outcome one = te_attn("explain " + quoted(kProblem));
  const Outcome both = te_attn("explain - < '" + lines + "'");
  EXPECT_EQ(both.code, 0) << both.err;
  EXPECT_EQ(both.out, one.out + "\n" + one.out + "\n");
}

TEST(TeAttn, CheckPrintsTheWorstErrorOfEveryTensor) {
  const std::string line = std::string(kProblem) + " causal=1 | seed=3 values=outliers";
  const Outcome human = te_attn("check " + quoted(line) + " --engine reference");
  EXPECT_EQ(human.code, 0) << human.out << human.err;
  for (const char* tensor : {"O ", "LSE ", "dQ ", "dK ", "dV "})
    EXPECT_TRUE(holds(human.out, tensor)) << human.out;
  const Outcome machine = te_attn("check --json " + quoted(line));
  EXPECT_TRUE(holds(machine.out, "\"ok\": true")) << machine.out;
  EXPECT_TRUE(holds(machine.out, "\"name\": \"dV\"")) << machine.out;
}

TEST(TeAttn, CheckTakesALineEach) {
  const std::string lines = testing::TempDir() + "te_attn_cases.txt";
  std::ofstream(lines) << "# a comment\n"
                       << kProblem << " | seed=3  # another\n\n"
                       << kProblem << "\n";
  const Outcome right = te_attn("check - --engine reference < '" + lines + "'");
  EXPECT_EQ(right.code, 0) << right.err;
  EXPECT_EQ(right.out, "0 of 2 cases failed, 0 refused\n");
  const Outcome wrong = te_attn("check - --device 99 < '" + lines + "'");
  EXPECT_EQ(wrong.code, 1);
  for (const char* part : {"line 2\n", "line 4\n", "2 of 2 cases failed"})
    EXPECT_TRUE(holds(wrong.out, part)) << wrong.out;
  EXPECT_EQ(te_attn("check - < /dev/null").code, 2);
}

TEST(TeAttn, TimeMeasuresBothDirections) {
  const Outcome human = te_attn("time " + quoted(kProblem));
  EXPECT_EQ(human.code, 0);
  for (const char* part : {"forward", "backward", " ms", "GFLOP/s"})
    EXPECT_TRUE(holds(human.out, part)) << human.out;
  const Outcome machine = te_attn("time --json " + quoted(kProblem));
  EXPECT_TRUE(holds(machine.out, "\"milliseconds\"")) << machine.out;
}

TEST(TeAttn, FuzzCountsWhatFails) {
  EXPECT_EQ(te_attn("fuzz --count 5 --seed 10").out, "0 of 5 cases failed, 0 refused\n");
  EXPECT_EQ(te_attn("fuzz 5 --json --engine reference").out,
            "{\"cases\": 5, \"failed\": 0, \"refused\": 0}\n");
  EXPECT_EQ(te_attn("fuzz 5 --parts").out, "0 of 5 cases failed, 0 refused\n");
  EXPECT_EQ(te_attn("fuzz 5 --training").out, "0 of 5 cases failed, 0 refused\n");
}

TEST(TeAttn, FuzzNamesTheCommandThatRepeatsAFailure) {
  const Outcome gpu = te_attn("fuzz 1 --seed 7 --device 99");
  EXPECT_TRUE(holds(gpu.out, "seed 7 (te-attn check --replay 7 --device 99)\n")) << gpu.out;
  const Outcome part = te_attn("fuzz 1 --parts --seed 7 --device 99");
  EXPECT_TRUE(holds(part.out, "(te-attn check --replay 7 --parts --device 99)\n")) << part.out;
  EXPECT_EQ(gpu.code, 1);
}

TEST(TeAttn, ReplayIsTheCaseOfOneSeed) {
  const Outcome out = te_attn("check --json --replay 12");
  EXPECT_EQ(out.code, 0);
  EXPECT_TRUE(holds(out.out, "\"case\": \"" + tea::kit::draw(12).text() + "\"")) << out.out;
}

// The command that it would start, printed by a program in place of Python.
TEST(TeAttn, BenchStartsASuiteOnItsOwnLibrary) {
  ASSERT_EQ(setenv("PYTHON", "echo", 1), 0);
  const Outcome models = te_attn("bench models --engine hopper,cudnn"), cpu = te_attn("bench cpu"),
                cudnn = te_attn("bench cudnn");
  unsetenv("PYTHON");
  EXPECT_EQ(models.code, 0);
  EXPECT_TRUE(holds(models.out, "/bench/gpu_models.py --library /")) << models.out;
  EXPECT_TRUE(holds(models.out, "/libte_attention.so --engines hopper,cudnn\n")) << models.out;
  EXPECT_TRUE(holds(cpu.out, "/bench/cpu_vs_torch.py --library /")) << cpu.out;
  EXPECT_TRUE(holds(cudnn.out, "/bench/gpu_vs_torch.py --library /")) << cudnn.out;
  EXPECT_TRUE(holds(cudnn.out, ".so --engines cudnn --peers cudnn\n")) << cudnn.out;
}

TEST(TeAttn, AProblemThatNoEngineRunsIsOne) {
  const Outcome check = te_attn("check " + quoted(kProblem) + " --device 99");
  EXPECT_EQ(check.code, 1);
  EXPECT_TRUE(holds(check.out, "device is 99")) << check.out;
}

struct Mistake {
  const char* arguments;
  const char* fragment;
};
class TeAttnMistake : public testing::TestWithParam<Mistake> {};

TEST_P(TeAttnMistake, IsOneLineAndCodeTwo) {
  const Outcome o = te_attn(GetParam().arguments);
  EXPECT_EQ(o.code, 2);
  EXPECT_EQ(o.out, "");
  EXPECT_TRUE(holds(o.err, GetParam().fragment)) << o.err;
  EXPECT_EQ(o.err.find('\n'), o.err.size() - 1) << "one line: " << o.err;
}

INSTANTIATE_TEST_SUITE_P(
    Arguments, TeAttnMistake,
    testing::Values(
        Mistake{"", "COMMAND is missing"}, Mistake{"fly", "COMMAND is \"fly\""},
        Mistake{"info extra", "\"extra\""}, Mistake{"check a b", "only one"},
        Mistake{"info --loud", "\"--loud\""},
        Mistake{"check --engine", "--engine is without a value"},
        Mistake{"explain \"dtype=int8\" --device x", "--device is \"x\""},
        Mistake{"explain \"dtype=int8\"", "dtype=int8"},
        Mistake{"explain \"dtype=bf16 heads_q=0\"", "heads_q is 0"},
        Mistake{"check \"dtype=bf16 colour=1\"", "colour=1"},
        Mistake{"check \"dtype=bf16 heads_q=2 heads_kv=3 dim_qk=8\"", "heads_q is 2"},
        Mistake{"check \"dtype=bf16 | sneed=1\"", "sneed=1"},
        Mistake{"time \"dtype=bf16 | seed=x\"", "seed"},
        Mistake{"time \"dtype=bf16 heads_q=1 heads_kv=1 dim_qk=7\"", "dim_qk is 7"},
        Mistake{"check \"dtype=bf16\" --engine nothing",
                "cpu-generic, reference"},  // after those of GPUs, if it was built with them
        Mistake{"fuzz 3 --engine nothing", "--engine is \"nothing\"; needs one of "},
        // An option that a command does not read.
        Mistake{"info --engine cpu", "option is \"--engine\"; needs --json with info"},
        Mistake{"check \"dtype=bf16\" --count 3", "option is \"--count\""},
        Mistake{"fuzz 3 --replay 4", "option is \"--replay\""},
        Mistake{"fuzz many", "COUNT is \"many\""}, Mistake{"fuzz 3 --seed -1", "--seed is \"-1\""},
        Mistake{"fuzz", "COUNT is missing"}, Mistake{"fuzz 3 --count 4", "COUNT is given twice"},
        Mistake{"bench", "SUITE is missing"},
        Mistake{"bench all",
                "SUITE is \"all\"; needs one of mha-16k, cudnn, models, fp8, cpu, "
                "front-end"},
        Mistake{"bench cpu --engine reference", "--engine is reference; needs none"},
        Mistake{"check", "CASE is missing"}, Mistake{"check x --replay 4", "CASE is given twice"}));

TEST(TeAttn, CommandsOfTheReadmeWork) {
  std::ifstream readme(TE_ATTENTION_SOURCE_DIR "/README.md");
  const std::string command = "build/release/te-attn ";
  int found = 0;
  for (std::string line; std::getline(readme, line);) {
    if (line.rfind(command, 0) != 0) continue;
    ++found;
    EXPECT_EQ(te_attn(line.substr(command.size())).code, 0) << line;
  }
  EXPECT_GE(found, 2);
}

TEST(TeAttn, HelpIsNotAMistake) {
  for (const char* arguments : {"--help", "-h", "check --help"}) {
    const Outcome o = te_attn(arguments);
    EXPECT_EQ(o.code, 0);
    EXPECT_TRUE(holds(o.out, "usage: te-attn COMMAND"));
  }
  EXPECT_EQ(te_attn("--version").out, "te-attention 0.1.0\n");
}

}  // namespace
