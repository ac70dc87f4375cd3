// Expects the error of a TransformerEngine call: its type, the form of its text and what it says.
#pragma once
#include <gtest/gtest.h>

#include <functional>
#include <stdexcept>
#include <string>

namespace tea::test {

inline void expect_error(const std::function<void()>& call, const std::string& message) {
  const testing::Matcher<std::string> form =
      testing::MatchesRegex("[a-z0-9_]+\\.(cpp|h):[0-9]+ in function [A-Za-z0-9_]+: .+");
  try {
    call();
    ADD_FAILURE() << "no error; needs one that says: " << message;
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    EXPECT_TRUE(form.Matches(text)) << text;
    EXPECT_NE(text.find(message), std::string::npos) << text << "\nneeds: " << message;
  }
}

}  // namespace tea::test

#define EXPECT_NVTE_ERROR(call, message)                         \
  do {                                                           \
    SCOPED_TRACE(#call);                                         \
    ::tea::test::expect_error([&] { (void)(call); }, (message)); \
  } while (0)
