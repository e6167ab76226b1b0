// Runs every driver at every level.
#include <cstdio>

#include "runtime/level.hpp"
#include "sanitized.hpp"

int main() {
    for (const auto& level : fusible::usable_levels()) {
        fusible::set_level(level);
        for (const auto drive : fusible::Drive::all()) drive();
    }
    std::puts("done");
}
