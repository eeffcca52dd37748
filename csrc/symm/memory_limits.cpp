#include "csrc/symm/memory_limits.h"

#include <sys/resource.h>

#include <algorithm>
#include <fstream>
#include <sstream>

namespace mok {
namespace {

/// The number in a file, or no limit ("max", or no such file).
int64_t read_limit(const char* path) {
    std::ifstream file(path);
    int64_t value = 0;
    return file >> value ? value : INT64_MAX;
}

std::string mebibytes(int64_t bytes) {
    return bytes == INT64_MAX ? "none" : std::to_string(bytes >> 20) + " MiB";
}

}  // namespace

int64_t MemoryLimits::hard_limit() const {
    return std::min({machine_bytes, cgroup_bytes, file_bytes});
}

std::string MemoryLimits::text() const {
    return "memory and swap of the machine " + mebibytes(machine_bytes) + ", available " +
           mebibytes(available_bytes) + ", the container's limit " + mebibytes(cgroup_bytes) +
           ", ulimit -f " + mebibytes(file_bytes);
}

MemoryLimits read_memory_limits() {
    MemoryLimits limits{0, INT64_MAX, INT64_MAX, INT64_MAX};
    std::ifstream file("/proc/meminfo");
    for (std::string line; std::getline(file, line);) {
        std::istringstream stream(line);
        std::string key;
        int64_t kibibytes = 0;
        stream >> key >> kibibytes;
        if (key == "MemTotal:" || key == "SwapTotal:") limits.machine_bytes += kibibytes << 10;
        if (key == "MemAvailable:") limits.available_bytes = kibibytes << 10;
    }
    if (limits.machine_bytes == 0) limits.machine_bytes = INT64_MAX;
    limits.cgroup_bytes = std::min(read_limit("/sys/fs/cgroup/memory.max"),
                                   read_limit("/sys/fs/cgroup/memory/memory.limit_in_bytes"));
    rlimit file_size{};
    if (getrlimit(RLIMIT_FSIZE, &file_size) == 0 && file_size.rlim_cur != RLIM_INFINITY) {
        limits.file_bytes = static_cast<int64_t>(file_size.rlim_cur);
    }
    return limits;
}

}  // namespace mok
