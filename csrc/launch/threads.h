// A small pool of threads of our own: no OpenMP runtime to clash with torch's, and safe to fork.
#pragma once

#include <cstdint>

namespace fp16opt {

using Task = void (*)(void* context, int64_t item);

// Calls task(context, item) for every item in [0, count), on up to `threads` threads, the caller among them, and
// returns when all are done. Which thread takes which item is left open: results must not depend on it. Runs serially
// where the pool is busy with another caller's work. The task must not throw.
void run_parallel(int64_t count, int threads, Task task, void* context);

template <class Function>
void parallel_for(int64_t count, int threads, Function&& function) {
    auto task = [](void* context, int64_t item) { (*static_cast<Function*>(context))(item); };
    run_parallel(count, threads, task, &function);
}

}  // namespace fp16opt
