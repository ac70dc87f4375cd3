// A line plot as an SVG file.
#include "plot.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <stdexcept>

#include "format.h"

namespace gpt {
namespace {

constexpr double kWidth = 860, kHeight = 480;
constexpr double kLeft = 64, kRight = 840, kTop = 100, kBottom = 424;  // of the frame
constexpr double kDot = 3.2;                                           // radius

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    if (c == '&')
      out += "&amp;";
    else if (c == '<')
      out += "&lt;";
    else
      out += c;
  }
  return out;
}

std::string label(double x, double y, const char* attributes, const std::string& text) {
  return format("<text x=\"%.1f\" y=\"%.1f\" %s>", x, y, attributes) + escaped(text) + "</text>\n";
}

// A range of round numbers and the distance between its ticks: 1, 2 or 5 times a power of ten.
struct Axis {
  double low, high, step, from, to;  // values, and where they lie on the page

  Axis(double smallest, double largest, double from_, double to_) : from(from_), to(to_) {
    const double rough = std::max(largest - smallest, 1e-9) / 6;
    const double power = std::pow(10, std::floor(std::log10(rough)));
    step = power * (rough < 2 * power ? 2 : rough < 5 * power ? 5 : 10);
    low = std::floor(smallest / step) * step;
    high = std::ceil(largest / step) * step;
  }
  double at(double value) const { return from + (value - low) / (high - low) * (to - from); }
};

struct Axes {
  Axis x, y;
};

Axes fit(const Plot& plot) {
  double top = 0, bottom = 1e9, right = 1;
  for (const Curve& curve : plot.curves) {
    for (const auto& [x, y] : curve.points) {
      right = std::max(right, x), top = std::max(top, y), bottom = std::min(bottom, y);
    }
  }
  for (const Level& level : plot.levels) {
    top = std::max(top, level.value), bottom = std::min(bottom, level.value);
  }
  Axes axes = {{0, right, kLeft, kRight}, {bottom, top, kBottom, kTop}};
  axes.x.high = right;  // a curve ends at the frame
  return axes;
}

std::string draw_frame(const Plot& plot, const Axes& axes) {
  std::string out = label(kLeft, 32, "class=\"title\"", plot.title) +
                    label(kLeft, 54, "class=\"soft\"", plot.subtitle);
  for (double y = axes.y.low; y <= axes.y.high + axes.y.step / 2; y += axes.y.step) {
    const double at = axes.y.at(y);
    out += format("<path class=\"grid\" d=\"M%.1f %.1fH%.1f\"/>\n", kLeft, at, kRight);
    out += label(kLeft - 10, at + 4, "class=\"soft end\"", format("%g", y));
  }
  for (double x = axes.x.low; x <= axes.x.high * 1.0001; x += axes.x.step) {
    const double at = axes.x.at(x);
    out += format("<path class=\"axis\" d=\"M%.1f %.1fv5\"/>\n", at, kBottom);
    out += label(at, kBottom + 20, "class=\"soft middle\"", format("%g", x));
  }
  out += format("<path class=\"axis\" d=\"M%.1f %.1fH%.1f\"/>\n", kLeft, kBottom, kRight);
  out += label((kLeft + kRight) / 2, kHeight - 14, "class=\"soft middle\"", plot.x_name);
  return out + label(kLeft, kTop - 10, "class=\"soft\"", plot.y_name);
}

std::string draw_level(const Level& level, const Axes& axes) {
  const double at = axes.y.at(level.value);
  return format("<path class=\"level\" d=\"M%.1f %.1fH%.1f\"/>\n", kLeft, at, kRight) +
         label(kRight - 4, at - 7, "class=\"end\"", level.name);
}

std::string draw_curve(const Curve& curve, const Axes& axes) {
  const char* colour = curve.colour.c_str();
  std::string out =
      format("<path fill=\"none\" stroke=\"%s\" stroke-width=\"%g\" d=\"", colour, curve.width);
  char command = 'M';
  for (const auto& [x, y] : curve.points) {
    out += format("%c%.1f %.1f", command, axes.x.at(x), axes.y.at(y));
    command = 'L';
  }
  out += "\"/>\n";
  for (const auto& [x, y] : curve.points) {
    if (!curve.dots) break;
    out += format("<circle cx=\"%.1f\" cy=\"%.1f\" r=\"%g\" fill=\"%s\"/>\n", axes.x.at(x),
                  axes.y.at(y), kDot, colour);
  }
  return out;
}

// Names of curves in a row above the frame, at its right.
std::string draw_names(const Plot& plot) {
  std::string out;
  double x = kRight;
  for (auto curve = plot.curves.rbegin(); curve != plot.curves.rend(); ++curve) {
    if (curve->name.empty()) continue;
    out += label(x, kTop - 10, "class=\"end\"", curve->name);
    x -= 7.2 * static_cast<double>(curve->name.size()) + 8;  // about the width of the text
    out += format("<path stroke=\"%s\" stroke-width=\"3\" d=\"M%.1f %.1fh-18\"/>\n",
                  curve->colour.c_str(), x, kTop - 14.5);
    x -= 36;
  }
  return out;
}

constexpr const char* kStyle = R"(<style>
text { font: 13px system-ui, sans-serif; fill: #1f2430; }
.title { font-size: 18px; font-weight: 600; }
.soft { fill: #687083; }
.middle { text-anchor: middle; }
.end { text-anchor: end; }
.grid { stroke: #e9ebf0; }
.axis { stroke: #9aa1b1; }
.level { stroke: #687083; stroke-width: 1.5; stroke-dasharray: 6 5; }
</style>
)";

}  // namespace

void write_svg(const Plot& plot, const std::string& path) {
  const Axes axes = fit(plot);
  std::string out = format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" "
      "height=\"%g\" stroke-linejoin=\"round\">\n",
      kWidth, kHeight, kWidth, kHeight);
  out += kStyle;
  out += "<rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n";
  out += draw_frame(plot, axes);
  for (const Curve& curve : plot.curves) out += draw_curve(curve, axes);
  for (const Level& level : plot.levels) out += draw_level(level, axes);
  out += draw_names(plot) + "</svg>\n";
  std::ofstream file(path, std::ios::binary);
  if (!(file << out).flush()) throw std::runtime_error("cannot write " + path);
}

}  // namespace gpt
