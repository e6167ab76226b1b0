// Which instruction set the kernels use: the best that the CPU has, or a lower one that Python asks for.
#pragma once

#include <string>
#include <vector>

namespace fusible {

enum class Level : int { Generic = 0, Avx2 = 1, Avx512 = 2, Avx512Bf16 = 3, Amx = 4 };

const char* name_of(Level level);

/// The level in force. A relaxed atomic read.
Level current_level();

/// Levels that this build has and this CPU can run, lowest first.
std::vector<std::string> usable_levels();

/// Levels that this build has.
std::vector<std::string> compiled_levels();

std::vector<std::string> cpu_features();

std::string get_level();

/// Chooses a level by name; "" restores the best. Raises ArgumentError for a name that is unknown or that the CPU cannot run.
void set_level(const std::string& name);

}  // namespace fusible
