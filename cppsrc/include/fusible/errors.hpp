// Exceptions of native code. The binding layer raises each as the class of the same name in `fusible.errors`.
#pragma once

#include <stdexcept>
#include <string>

namespace fusible {

struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// An argument has an illegal value (a ValueError in Python).
struct ArgumentError : Error {
    using Error::Error;
};

/// A tensor's elements are the negatives of what its memory holds. Of an argument that is only read, a copy is made instead.
struct NegatedError : ArgumentError {
    using ArgumentError::ArgumentError;
};

/// A tensor has the wrong rank, width or number of elements (a ValueError in Python).
struct ShapeError : Error {
    using Error::Error;
};

/// A tensor or an argument has the wrong type (a TypeError in Python).
struct DTypeError : Error {
    using Error::Error;
};

/// The one form of a message: "{of}: expected {what}, got {got}; {do_}."
inline std::string expected(const std::string& what, const std::string& of, const std::string& got, const std::string& do_) {
    return of + ": expected " + what + ", got " + got + "; " + do_ + ".";
}

}  // namespace fusible
