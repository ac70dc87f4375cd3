// docs/semantics.md says what the code does: its pictures of masks, of the dropout tile and its
// table of layouts are read from the page and compared with the definitions, cell by cell.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "math/dropout.h"
#include "math/mask.h"
#include "nvte/layout.h"

namespace tea {
namespace {

using Words = std::vector<std::string>;

Words words(const std::string& line) {
  std::istringstream in(line);
  return {std::istream_iterator<std::string>(in), {}};
}

std::vector<std::string> page() {
  std::ifstream file(TE_ATTENTION_SOURCE_DIR "/docs/semantics.md");
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// A fenced block: the words of the comment before it ("<!-- kind: ... -->") and its lines.
struct Picture {
  Words about;
  std::vector<Words> rows;
};

std::vector<Picture> pictures(const std::string& kind) {
  std::vector<Picture> found;
  const auto lines = page();
  const std::string start = "<!-- " + kind + ":";
  for (size_t i = 0; i + 1 < lines.size(); ++i) {
    if (!lines[i].starts_with(start)) continue;
    Picture picture{words(lines[i].substr(start.size())), {}};
    for (i += 2; lines[i] != "```"; ++i) picture.rows.push_back(words(lines[i]));
    found.push_back(picture);
  }
  return found;
}

struct MaskPicture {
  MaskRule rule{};
  int64_t length_q = 0, length_kv = 0, rows = 0, cols = 0;
};

MaskPicture mask_of(const Picture& picture) {
  std::map<std::string, int64_t> value;
  for (const std::string& word : picture.about)
    if (const size_t equals = word.find('='); equals != word.npos)
      value[word.substr(0, equals)] = std::stoll(word.substr(equals + 1));
  MaskPicture m;
  m.rule = {static_cast<int32_t>(value["causal"]), static_cast<int32_t>(value["bottom_right"]),
            value["window_left"], value["window_right"]};
  m.length_q = value["length_q"], m.length_kv = value["length_kv"];
  m.rows = value.contains("rows") ? value["rows"] : m.length_q;
  m.cols = value.contains("cols") ? value["cols"] : m.length_kv;
  return m;
}

TEST(Semantics, MaskPictures) {
  const auto all = pictures("mask");
  ASSERT_GE(all.size(), 10u);
  for (const Picture& picture : all) {
    const MaskPicture m = mask_of(picture);
    const Band b = band(m.rule, diagonal(m.rule.bottom_right, m.length_q, m.length_kv), 0, 0);
    std::vector<Words> expected;
    for (int64_t r = 0; r < m.rows; ++r) {
      expected.emplace_back();
      for (int64_t c = 0; c < m.cols; ++c)
        expected.back().push_back(r >= m.length_q || c >= m.length_kv ? "x"
                                  : visible(b, r, c)                  ? "■"
                                                                      : "·");
    }
    EXPECT_EQ(picture.rows, expected) << testing::PrintToString(picture.about);
  }
}

TEST(Semantics, DropoutTile) {
  const auto all = pictures("dropout");
  ASSERT_EQ(all.size(), 1u);
  const auto& rows = all[0].rows;
  ASSERT_EQ(rows.size(), 16u);
  const RngState rng{0x0123456789abcdefu, 42};
  std::map<char, std::vector<uint32_t>> call_of;  // letter -> the four words
  for (int64_t r = 0; r < 16; ++r) {
    ASSERT_EQ(rows[r].size(), 16u);
    for (int64_t c = 0; c < 16; ++c) {
      const char letter = rows[r][c][0];
      const int number = rows[r][c][1] - '0';
      const Philox4 cell = dropout_cell(rng, 7, r, c);
      const std::vector<uint32_t> call(cell.word, cell.word + 4);
      EXPECT_EQ(call_of.try_emplace(letter, call).first->second, call) << r << " " << c;
      const uint32_t uniform = cell.word[number / 2] >> (number % 2 * 16) & 0xFFFF;
      EXPECT_EQ(dropout_uniform(cell, r, c), uniform) << r << " " << c;
    }
  }
  EXPECT_EQ(call_of.size(), 32u);
}

// Memory order as text, "s b 3 h d": the stride of a letter is the product of all that follow it.
tea_strides strides_of(const Words& order, const std::map<std::string, int64_t>& size) {
  std::map<std::string, int64_t> stride;
  int64_t next = 1;
  for (size_t i = order.size(); i-- > 0;) {
    stride[order[i]] = next;
    next *= size.at(order[i]);
  }
  const auto first = [&](const char* a, const char* b) {
    return stride.contains(a) ? stride[a] : stride.contains(b) ? stride[b] : int64_t{0};
  };
  const int64_t seq = stride.contains("slot") ? stride["slot"] : first("s", "t");
  return {first("b", "page"), seq, first("h", "hg")};
}

TEST(Semantics, Layouts) {
  const std::map<std::string, int64_t> size = {{"b", 2},    {"s", 7},   {"t", 11}, {"h", 6},
                                               {"hg", 3},   {"d", 8},   {"2", 2},  {"3", 3},
                                               {"page", 5}, {"slot", 4}};
  int rows = 0;
  for (const std::string& line : page()) {
    // | value | `name` | `order of Q` | `order of K and V` |
    Words cells;
    std::istringstream in(line);
    for (std::string cell; std::getline(in, cell, '|');) cells.push_back(cell);
    if (cells.size() < 5 || cells[2].find("NVTE_") == std::string::npos) continue;
    const auto quoted = [](const std::string& s) {
      const size_t open = s.find('`');
      return s.substr(open + 1, s.find('`', open + 1) - open - 1);
    };
    const nvte::Layout& layout = nvte::layout_of(static_cast<NVTE_QKV_Layout>(std::stoi(cells[1])));
    const bool with_q = cells[4].find("with Q") != std::string::npos;
    const Words q = words(quoted(cells[3])), kv = with_q ? q : words(quoted(cells[4]));
    const auto expect = [&](const Words& order, const tea_strides& actual) {
      const tea_strides s = strides_of(order, size);
      EXPECT_EQ(actual.batch, s.batch) << line;
      EXPECT_EQ(actual.seq, s.seq) << line;
      EXPECT_EQ(actual.head, s.head) << line;
    };
    expect(q, strides(layout.q, layout.packing_q(), {2, 7, 6, 8}));
    const nvte::Extent keys = layout.paged() ? nvte::Extent{5, 4, 3, 8} : nvte::Extent{2, 7, 3, 8};
    expect(kv, strides(layout.kv, layout.packing_kv(), with_q ? nvte::Extent{2, 7, 6, 8} : keys));
    ++rows;
  }
  EXPECT_EQ(rows, 25);
}

}  // namespace
}  // namespace tea
