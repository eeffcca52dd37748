// Threads come in as a function, so that the executor knows neither torch nor OpenMP.
#pragma once

#include <atomic>
#include <cstdint>

namespace mok::cpu {

/// Calls body(context, worker) once for each worker in [0, count), in parallel where the host allows.
struct ThreadPool {
    int64_t count = 1;
    void (*launch)(int64_t count, void* context, void (*body)(void* context, int64_t worker)) = nullptr;
};

/// Runs body(task, worker) for every task in [0, num_tasks). Tasks are claimed from a counter, so which
/// worker runs which task varies; results must not depend on it. `worker` < threads.count indexes per-worker
/// scratch.
template <typename Body>
void for_each_task(const ThreadPool& threads, int64_t num_tasks, const Body& body) {
    if (threads.count <= 1 || num_tasks <= 1 || threads.launch == nullptr) {
        for (int64_t task = 0; task < num_tasks; ++task) body(task, int64_t{0});
        return;
    }
    struct Shared {
        std::atomic<int64_t> next{0};
        int64_t num_tasks;
        const Body* body;
    };
    Shared shared;
    shared.num_tasks = num_tasks;
    shared.body = &body;
    const int64_t workers = threads.count < num_tasks ? threads.count : num_tasks;
    threads.launch(workers, &shared, [](void* context, int64_t worker) {
        Shared& work = *static_cast<Shared*>(context);
        for (int64_t task = work.next.fetch_add(1, std::memory_order_relaxed); task < work.num_tasks;
             task = work.next.fetch_add(1, std::memory_order_relaxed)) {
            (*work.body)(task, worker);
        }
    });
}

}  // namespace mok::cpu
