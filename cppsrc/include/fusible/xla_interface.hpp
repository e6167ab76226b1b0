// What XLA's foreign-function interface looks like in memory (xla/ffi/api/c_api.h, version 0.1 on, whose structures only grow at their end): as much of
// it as a handler needs. A structure begins with its size in bytes and a list of extensions.
#pragma once

#include <cstddef>
#include <cstdint>

namespace fusible::xla {

struct Error;

struct Extension {
    std::size_t size;
    int type;
    Extension* next;
};

constexpr int kMetadata = 1;  // the one type of extension

struct Version {
    std::size_t size;
    Extension* extensions;
    int major;
    int minor;
};

struct ErrorArguments {
    std::size_t size;
    Extension* extensions;
    const char* message;
    int code;
};

constexpr int kInvalidArgument = 3;
constexpr int kResourceExhausted = 8;
constexpr int kInternal = 13;

struct ErrorDestruction {
    std::size_t size;
    Extension* extensions;
    Error* error;
};

struct Api {
    std::size_t size;
    Extension* extensions;
    Version version;
    const void* internal;
    Error* (*create_error)(ErrorArguments*);
    const void* get_message;
    void (*destroy_error)(ErrorDestruction*);
};

/// Element types, as XLA numbers them.
enum class Type : int { Bool = 1, Int32 = 4, Int64 = 5, UInt8 = 6, Float16 = 10, Float32 = 11, Float64 = 12, BFloat16 = 16, Float8E5M2 = 19, Float8E4M3 = 20 };

struct Buffer {
    std::size_t size;
    Extension* extensions;
    Type dtype;
    void* data;
    std::int64_t rank;
    std::int64_t* dims;
};

/// Operands, and results: `values` point to buffers.
struct Buffers {
    std::size_t size;
    Extension* extensions;
    std::int64_t count;
    int* types;
    Buffer** values;
};

struct Text {
    const char* data;
    std::size_t length;
};

struct Number {
    Type dtype;
    void* value;
};

constexpr int kNumberAttribute = 3;
constexpr int kTextAttribute = 4;

/// `values` point to a Number or a Text, as `types` tell.
struct Attributes {
    std::size_t size;
    Extension* extensions;
    std::int64_t count;
    int* types;
    Text** names;
    void** values;
};

struct Metadata {
    std::size_t size;
    Version version;
};

struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};

struct Frame {
    std::size_t size;
    Extension* extensions;
    const Api* api;
    void* context;
    int stage;
    Buffers operands;
    Buffers results;
    Attributes attributes;
};

using Handler = Error*(Frame*);

}  // namespace fusible::xla
