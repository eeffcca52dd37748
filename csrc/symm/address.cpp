#include "csrc/symm/address.h"

#include <sys/random.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <map>

#include "csrc/comm/errors.h"
#include "csrc/layout/check.h"

namespace mok {
namespace {

std::string kernel_identity() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string id;
    if (std::getline(file, id)) return id;
    char name[256] = {};
    gethostname(name, sizeof(name) - 1);
    return name;
}

std::string network_namespace() {
    char target[128] = {};
    return readlink("/proc/self/ns/net", target, sizeof(target) - 1) > 0 ? target : "unknown";
}

std::string list_of(const std::map<std::string, std::vector<int>>& ranks_by_place) {
    std::string text;
    for (const auto& [place, ranks] : ranks_by_place) {
        text += text.empty() ? "" : "; ";
        text += place + ": rank";
        for (size_t i = 0; i < ranks.size(); ++i) text += (i == 0 ? " " : ", ") + std::to_string(ranks[i]);
    }
    return text;
}

void check_one_machine(const std::vector<HeapAddress>& addresses) {
    std::map<std::string, std::vector<int>> hosts, networks;
    for (const HeapAddress& address : addresses) {
        hosts[address.host].push_back(address.rank);
        networks[address.network].push_back(address.rank);
    }
    if (hosts.size() > 1) {
        throw PeersNotLocal(
            "the ranks of this group run on " + std::to_string(hosts.size()) + " hosts (" + list_of(hosts) +
            "), but the cpu backend shares the memory of one; use backend=\"collective\" or a group "
            "within one host.");
    }
    if (networks.size() > 1) {
        throw PeersNotLocal("the ranks of this group run in " + std::to_string(networks.size()) +
                            " network namespaces (" + list_of(networks) +
                            "), as with one container per rank, and cannot pass memory descriptors to each "
                            "other; run all ranks in "
                            "one container, share its network namespace, or use backend=\"collective\".");
    }
}

}  // namespace

std::string random_name() {
    unsigned char bytes[16];
    size_t filled = 0;
    while (filled < sizeof(bytes)) {
        const ssize_t got = getrandom(bytes + filled, sizeof(bytes) - filled, 0);
        if (got > 0) filled += static_cast<size_t>(got);
    }
    std::string name;
    for (unsigned char byte : bytes) {
        name += "0123456789abcdef"[byte >> 4];
        name += "0123456789abcdef"[byte & 15];
    }
    return name;
}

HeapAddress local_address(int rank, int num_ranks, int64_t fixed_bytes, int64_t arena_bytes) {
    HeapAddress address;
    address.rank = rank;
    address.num_ranks = num_ranks;
    address.fixed_bytes = fixed_bytes;
    address.arena_bytes = arena_bytes;
    address.host = kernel_identity();
    address.network = network_namespace();
    address.uid = geteuid();
    address.pid = getpid();
    return address;
}

std::string HeapAddress::text() const {
    return concat("heap=1;rank=", rank, ";num_ranks=", num_ranks, ";fixed_bytes=", fixed_bytes,
                  ";arena_bytes=", arena_bytes, ";host=", host, ";network=", network, ";uid=", uid,
                  ";pid=", pid, ";socket=", socket, ";token=", token);
}

HeapAddress HeapAddress::parse(const std::string& text, int rank) {
    std::map<std::string, std::string> fields;
    std::istringstream stream(text);
    for (std::string item; std::getline(stream, item, ';');) {
        const size_t equals = item.find('=');
        if (equals != std::string::npos) fields[item.substr(0, equals)] = item.substr(equals + 1);
    }
    if (fields["heap"] != "1") {
        throw HeapError(
            concat("rank ", rank, " published the address '", text.substr(0, 80),
                   "', which this version of mok cannot read; install the same mok on all ranks."));
    }
    const auto number = [&](const char* key) { return std::strtoll(fields[key].c_str(), nullptr, 10); };
    HeapAddress address;
    address.rank = static_cast<int>(number("rank"));
    address.num_ranks = static_cast<int>(number("num_ranks"));
    address.fixed_bytes = number("fixed_bytes");
    address.arena_bytes = number("arena_bytes");
    address.host = fields["host"];
    address.network = fields["network"];
    address.uid = number("uid");
    address.pid = number("pid");
    address.socket = fields["socket"];
    address.token = fields["token"];
    return address;
}

std::vector<HeapAddress> parse_group(const std::vector<std::string>& texts, const HeapAddress& mine) {
    if (static_cast<int>(texts.size()) != mine.num_ranks) {
        throw HeapError(concat("addresses has ", texts.size(), " entries, but the heap was created for ",
                               mine.num_ranks, " ranks; pass one address per rank."));
    }
    std::vector<HeapAddress> addresses;
    for (int r = 0; r < mine.num_ranks; ++r) {
        addresses.push_back(HeapAddress::parse(texts[static_cast<size_t>(r)], r));
        const HeapAddress& address = addresses.back();
        if (address.rank != r || address.num_ranks != mine.num_ranks) {
            throw HeapError(concat("addresses[", r, "] is of rank ", address.rank, " of ", address.num_ranks,
                                   ", but rank ", r, " of ", mine.num_ranks, " was expected."));
        }
    }
    check_one_machine(addresses);
    for (const HeapAddress& address : addresses) {
        if (address.fixed_bytes != mine.fixed_bytes || address.arena_bytes != mine.arena_bytes) {
            throw HeapError(concat("rank ", address.rank, " has a window of ", address.fixed_bytes, " + ",
                                   address.arena_bytes, " bytes (fixed_bytes + arena_bytes), rank ",
                                   mine.rank, " of ", mine.fixed_bytes, " + ", mine.arena_bytes,
                                   "; pass equal sizes (also MOK_ARENA_BYTES) on all ranks."));
        }
        if (address.uid != mine.uid) {
            throw HeapError(concat(
                "rank ", address.rank, " runs as user ", address.uid, ", rank ", mine.rank, " as user ",
                mine.uid, "; memory is shared within one user only: start all ranks as the same user."));
        }
    }
    return addresses;
}

}  // namespace mok
