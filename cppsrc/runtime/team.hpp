// The threads that compute the calls of a compiled program, on whichever threads XLA makes them.
#pragma once

#include <cstddef>
#include <functional>

#include "runtime/threads.hpp"

namespace fusible {

/// Runs `body`, which runs a compiled program: meanwhile the other threads of this one's OpenMP help with the loops of the program's calls. Between two
/// regions of their own they would wait by spinning, some ten milliseconds, on the processors that XLA's threads need; and loops that XLA's threads
/// began by OpenMP would each start others.
void run_with_team(const std::function<void()>& body);

/// While it lives, the parallel loops of this thread are the team's: of one thread at a time, which has all of the team. One that waits for its turn
/// helps whose turn it is.
class Turn {
  public:
    Turn();
    ~Turn();
    Turn(const Turn&) = delete;
    Turn& operator=(const Turn&) = delete;
};

/// Whether it is this thread's turn.
bool has_turn();

/// Whether this thread runs tasks of a loop of the team's.
bool is_helping();

/// How many threads compute a loop of the team's: those that help, and the one whose turn it is.
int team_size();

/// run_tasks for the thread whose turn it is; `threads` > 1, itself among them.
void run_by_team(std::size_t count, int threads, Task task, const void* context);

}  // namespace fusible
