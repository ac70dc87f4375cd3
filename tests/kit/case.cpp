// The words of a case, as one table that parsing and printing read.
#include "kit/case.h"

#include <charconv>
#include <fstream>
#include <span>
#include <sstream>

#include "core/error.h"

namespace tea::kit {
namespace {

constexpr std::string_view kValues[] = {"randn",      "onehot",       "constant",  "outliers",
                                        "extreme",    "negative",     "denormal",  "maxfinite",
                                        "nan_masked", "nan_attended", "mask_bias", "zero"};
constexpr std::string_view kLayouts[] = {"default", "bshd",    "sbhd",         "bhsd",
                                         "packed3", "packed2", "interleaved3", "interleaved2",
                                         "odd",     "shared"};
constexpr std::string_view kScales[] = {"none", "shared", "own"};

[[noreturn]] void malformed(std::string_view name, std::string_view value,
                            const std::string& needed) {
  refuse_argument("case word " + std::string(name), "\"" + std::string(value) + "\"", needed);
}

template <class T>
T integer(std::string_view name, std::string_view value) {
  T x{};
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), x);
  if (error != std::errc() || end != value.data() + value.size())
    malformed(name, value, "an integer");
  return x;
}

std::vector<int64_t> integers(std::string_view name, std::string_view value) {
  std::vector<int64_t> out;
  for (size_t begin = 0; begin <= value.size();) {
    const size_t end = std::min(value.find(',', begin), value.size());
    out.push_back(integer<int64_t>(name, value.substr(begin, end - begin)));
    begin = end + 1;
  }
  return out;
}

std::string joined(std::span<const int64_t> list) {
  std::string out;
  for (const int64_t x : list) out += (out.empty() ? "" : ",") + std::to_string(x);
  return out;
}

template <class E>
E named(std::string_view name, std::string_view value, std::span<const std::string_view> names) {
  std::string known;
  for (size_t i = 0; i < names.size(); ++i) {
    if (names[i] == value) return static_cast<E>(i);
    known += (i ? ", " : "one of ") + std::string(names[i]);
  }
  malformed(name, value, known);
}

using Name = std::string_view;
struct Word {
  Name name;
  void (*read)(Case&, Name name, std::string_view value);
  std::string (*show)(const Case&);  // empty: the default, not printed
};

template <int64_t Case::*M>
constexpr Word number(Name name) {
  return {name, [](Case& c, Name n, std::string_view v) { c.*M = integer<int64_t>(n, v); },
          [](const Case& c) { return c.*M ? std::to_string(c.*M) : std::string(); }};
}
template <std::vector<int64_t> Case::*M>
constexpr Word list(Name name) {
  return {name, [](Case& c, Name n, std::string_view v) { c.*M = integers(n, v); },
          [](const Case& c) { return joined(c.*M); }};
}
template <auto M, const auto& Names>
constexpr Word choice(Name name) {
  using Enum = std::remove_reference_t<decltype(std::declval<Case>().*M)>;
  return {name, [](Case& c, Name n, std::string_view v) { c.*M = named<Enum>(n, v, Names); },
          [](const Case& c) {
            return c.*M == Enum{} ? std::string() : std::string(Names[static_cast<size_t>(c.*M)]);
          }};
}

constexpr Word kWords[] = {
    list<&Case::lens_q>("lens_q"),
    list<&Case::lens_kv>("lens_kv"),
    number<&Case::max_q>("max_q"),
    number<&Case::max_kv>("max_kv"),
    number<&Case::gap>("gap"),
    number<&Case::tail>("tail"),
    number<&Case::spare_pages>("spare_pages"),
    number<&Case::one_table>("one_table"),
    number<&Case::shared_first>("shared_first"),
    {"seed", [](Case& c, Name n, std::string_view v) { c.seed = integer<uint64_t>(n, v); },
     [](const Case& c) { return c.seed ? std::to_string(c.seed) : std::string(); }},
    choice<&Case::values, kValues>("values"),
    choice<&Case::layout, kLayouts>("layout"),
    choice<&Case::scales, kScales>("scales"),
    number<&Case::sink_mean>("sink_mean"),
    number<&Case::bias_mean>("bias_mean"),
    number<&Case::omit_optional>("omit_optional"),
    {"origin",
     [](Case& c, Name n, std::string_view v) {
       const std::vector<int64_t> four = integers(n, v);
       if (four.size() != 4) malformed(n, v, "batch,head,row,column");
       std::copy(four.begin(), four.end(), c.origin);
     },
     [](const Case& c) {
       const bool zero = !c.origin[0] && !c.origin[1] && !c.origin[2] && !c.origin[3];
       return zero ? std::string() : joined(c.origin);
     }},
    number<&Case::origin_in_memory>("origin_in_memory"),
    {"shift", [](Case& c, Name n, std::string_view v) { c.shift = integer<int64_t>(n, v); },
     [](const Case& c) { return c.shift ? std::to_string(c.shift) : std::string(); }},
    {"origin_step",
     [](Case& c, Name n, std::string_view v) {
       std::istringstream in{std::string(v)};
       std::vector<int64_t> five;
       for (std::string one; std::getline(in, one, ',');) five.push_back(integer<int64_t>(n, one));
       if (five.size() != 5) malformed(n, v, "batch,head,row,column,shift");
       std::copy(five.begin(), five.end(), c.origin_step);
     },
     [](const Case& c) { return c.has_steps() ? joined(c.origin_step) : std::string(); }},
};

void read_word(Case& c, std::string_view word, uint32_t& seen) {
  const size_t equals = word.find('=');
  for (const Word& w : kWords) {
    if (equals == word.npos || w.name != word.substr(0, equals)) continue;
    const uint32_t bit = 1u << (&w - kWords);
    if (seen & bit) malformed(w.name, word, "each word once");
    seen |= bit;
    return w.read(c, w.name, word.substr(equals + 1));
  }
  malformed("(unknown)", word, "name=value with a word of tests/kit/case.cpp");
}

void check_lengths(const char* name, const std::vector<int64_t>& lens, int32_t form,
                   int64_t capacity) {
  if (form == TEA_DENSE && !lens.empty())
    malformed(name, joined(lens), "no lengths: the side is dense");
  for (const int64_t length : lens)
    if (length < 0 || (capacity >= 0 && length > capacity))
      malformed(name, joined(lens), "lengths from 0 to " + shown(capacity));
}

// Mistakes in a case must not look like mistakes of an engine.
void check_words(const Case& c) {
  const Problem& p = c.problem;
  const auto capacity = [](bool open, int64_t run, int64_t problem) {
    return !open ? problem : run ? run : -1;
  };
  check_lengths("lens_q", c.lens_q, p.q_form, capacity(p.varies_q(), c.max_q, p.seqlen_q));
  check_lengths("lens_kv", c.lens_kv, p.kv_form, capacity(p.varies_kv(), c.max_kv, p.seqlen_kv));
  const size_t q = c.lens_q.size(), kv = c.lens_kv.size();
  if (q && kv && q != kv)
    malformed("lens_kv", joined(c.lens_kv), "as many lengths as lens_q: " + shown(q));
  const auto batch = static_cast<size_t>(std::max<int64_t>(p.batch, 0));
  if (!p.varies() && ((q && q != batch) || (kv && kv != batch)))
    malformed("lens_q, lens_kv", shown(std::max(q, kv)), "one length per sequence of the batch");
  if (p.varies() && ((p.q_form != TEA_DENSE && q < kv) || (p.kv_form != TEA_DENSE && kv < q)))
    malformed("lens_q, lens_kv", shown(std::min(q, kv)), "lengths of both sides");
  if (c.gap && !p.gaps) malformed("gap", shown(c.gap), "gaps=1 in the problem");
}

std::string_view trimmed(std::string_view s) {
  const size_t begin = s.find_first_not_of(" \t\r\n"), end = s.find_last_not_of(" \t\r\n");
  return begin == s.npos ? std::string_view() : s.substr(begin, end - begin + 1);
}

}  // namespace

std::string Case::text() const {
  std::string words;
  for (const Word& w : kWords)
    if (const std::string value = w.show(*this); !value.empty())
      words += " " + std::string(w.name) + "=" + value;
  return problem.text() + (words.empty() ? "" : " |" + words);
}

Case Case::parse(std::string_view line) {
  const size_t bar = line.find('|');
  Case c;
  c.problem = Problem::parse(line.substr(0, bar));
  std::string_view words = bar == line.npos ? std::string_view() : line.substr(bar + 1);
  uint32_t seen = 0;
  for (words = trimmed(words); !words.empty(); words = trimmed(words)) {
    const std::string_view word = words.substr(0, words.find_first_of(" \t"));
    read_word(c, word, seen);
    words.remove_prefix(word.size());
  }
  check_words(c);
  return c;
}

std::vector<Line> read_lines(const std::string& path) {
  std::ifstream file(path);
  if (!file) refuse_argument("file", "\"" + path + "\"", "a readable file");
  std::vector<Line> out;
  std::string text;
  for (int number = 1; std::getline(file, text); ++number) {
    const std::string_view line = trimmed(std::string_view(text).substr(0, text.find('#')));
    if (!line.empty()) out.push_back({number, std::string(line)});
  }
  return out;
}

}  // namespace tea::kit
