// A line plot as an SVG file.
#pragma once
#include <string>
#include <utility>
#include <vector>

namespace gpt {

struct Curve {
  std::string name, colour;
  double width = 2;
  std::vector<std::pair<double, double>> points;
  bool dots = false;
};

struct Level {  // a dashed horizontal line
  std::string name;
  double value;
};

struct Plot {
  std::string title, subtitle, x_name, y_name;
  std::vector<Curve> curves;
  std::vector<Level> levels;
};

// Writes the file; throws if that fails.
void write_svg(const Plot& plot, const std::string& path);

}  // namespace gpt
