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

/// `without` says what one place for all ranks is needed for.
void check_one_machine(const std::vector<HeapAddress>& addresses, const std::string& without) {
    std::map<std::string, std::vector<int>> hosts, networks;
    for (const HeapAddress& address : addresses) {
        hosts[address.host].push_back(address.rank);
        networks[address.network].push_back(address.rank);
    }
    if (hosts.size() > 1) {
        throw PeersNotLocal(concat("the ranks of this group run on ", hosts.size(), " hosts (",
                                   list_of(hosts), "), but ", without,
                                   "; use backend=\"collective\" or a group within one host."));
    }
    if (networks.size() > 1) {
        throw PeersNotLocal(concat(
            "the ranks of this group run in ", networks.size(), " network namespaces (", list_of(networks),
            "), as with one container per rank, and cannot pass memory descriptors to each "
            "other; run all ranks in "
            "one container, share its network namespace, or use backend=\"collective\"."));
    }
}

void check_users(const std::vector<HeapAddress>& addresses, const HeapAddress& mine) {
    for (const HeapAddress& address : addresses) {
        if (address.uid == mine.uid) continue;
        throw HeapError(concat("rank ", address.rank, " runs as user ", address.uid, ", rank ", mine.rank,
                               " as user ", mine.uid,
                               "; memory is shared within one user only: start all ranks as the same user."));
    }
}

/// NVLink domains of the ranks, and whether it is one.
std::string describe_domains(const std::vector<HeapAddress>& addresses) {
    std::map<std::string, std::vector<int>> domains;
    for (const HeapAddress& address : addresses) {
        const DeviceOffer& offer = address.device;
        domains[offer.fabric.empty()    ? std::string("no fabric handle")
                : offer.cluster.empty() ? concat("host ", address.host)
                                        : concat("NVLink cluster ", offer.cluster, " clique ", offer.clique)]
            .push_back(address.rank);
    }
    return domains.size() == 1 && !addresses.front().device.fabric.empty() ? "" : list_of(domains);
}

void check_peer_access(const std::vector<HeapAddress>& addresses) {
    std::string pairs;
    for (const HeapAddress& one : addresses) {
        for (const HeapAddress& other : addresses) {
            const bool is_blocked = one.device.uuid != other.device.uuid &&
                                    one.device.unreachable.find(other.device.uuid + ",") != std::string::npos;
            if (!is_blocked) continue;
            pairs += concat(pairs.empty() ? "" : "; ", "rank ", one.rank, " on ", one.device.gpu,
                            " and rank ", other.rank, " on ", other.device.gpu);
        }
    }
    if (pairs.empty()) return;
    throw PeersNotLocal(concat("GPUs of this group cannot access each other's memory (", pairs,
                               "); use GPUs that are connected by NVLink (see nvidia-smi topo -p2p rw), or "
                               "backend=\"collective\"."));
}

Passing choose_passing(const std::vector<HeapAddress>& addresses, const HeapAddress& mine) {
    for (const HeapAddress& address : addresses) {
        if (address.device.wanted == mine.device.wanted) continue;
        throw HeapError(concat("MOK_HEAP_BACKING is ", address.device.wanted, " on rank ", address.rank,
                               " and ", mine.device.wanted, " on rank ", mine.rank,
                               ", but must be equal on all ranks."));
    }
    const std::string domains = describe_domains(addresses);
    if (domains.empty()) {
        check_peer_access(addresses);
        return Passing::kFabric;
    }
    if (mine.device.wanted == "fabric") {
        throw PeersNotLocal(
            concat("the GPUs of this group lie in several NVLink domains (", domains,
                   "), but MOK_HEAP_BACKING=fabric wants one; use a group within one domain, or "
                   "backend=\"collective\"."));
    }
    check_one_machine(addresses, concat("their GPUs lie in no common NVLink domain (", domains, ")"));
    check_peer_access(addresses);
    for (const HeapAddress& address : addresses) {
        if (address.device.has_fd) continue;
        throw HeapError(
            concat("rank ", address.rank, " on ", address.device.gpu,
                   " cannot pass its window as a descriptor, and there are no fabric handles for all "
                   "(",
                   domains, "); use backend=\"collective\"."));
    }
    check_users(addresses, mine);
    return Passing::kDescriptors;
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
    return concat("heap=2;rank=", rank, ";num_ranks=", num_ranks, ";fixed_bytes=", fixed_bytes,
                  ";arena_bytes=", arena_bytes, ";host=", host, ";network=", network, ";uid=", uid,
                  ";pid=", pid, ";socket=", socket, ";token=", token, ";gpu=", device.gpu,
                  ";uuid=", device.uuid, ";wanted=", device.wanted, ";has_fd=", device.has_fd ? 1 : 0,
                  ";fabric=", device.fabric, ";cluster=", device.cluster, ";clique=", device.clique,
                  ";unreachable=", device.unreachable);
}

HeapAddress HeapAddress::parse(const std::string& text, int rank) {
    std::map<std::string, std::string> fields;
    std::istringstream stream(text);
    for (std::string item; std::getline(stream, item, ';');) {
        const size_t equals = item.find('=');
        if (equals != std::string::npos) fields[item.substr(0, equals)] = item.substr(equals + 1);
    }
    if (fields["heap"] != "2") {
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
    address.device = {fields["gpu"],    fields["uuid"],    fields["wanted"], fields["has_fd"] == "1",
                      fields["fabric"], fields["cluster"], fields["clique"], fields["unreachable"]};
    return address;
}

GroupAddresses parse_group(const std::vector<std::string>& texts, const HeapAddress& mine) {
    if (static_cast<int>(texts.size()) != mine.num_ranks) {
        throw HeapError(concat("addresses has ", texts.size(), " entries, but the heap was created for ",
                               mine.num_ranks, " ranks; pass one address per rank."));
    }
    GroupAddresses group;
    for (int r = 0; r < mine.num_ranks; ++r) {
        group.ranks.push_back(HeapAddress::parse(texts[static_cast<size_t>(r)], r));
        const HeapAddress& address = group.ranks.back();
        if (address.rank != r || address.num_ranks != mine.num_ranks) {
            throw HeapError(concat("addresses[", r, "] is of rank ", address.rank, " of ", address.num_ranks,
                                   ", but rank ", r, " of ", mine.num_ranks, " was expected."));
        }
    }
    for (const HeapAddress& address : group.ranks) {
        if (address.is_device() == mine.is_device()) continue;
        const auto kind = [](const HeapAddress& a) {
            return a.is_device() ? a.device.gpu : std::string("the CPU");
        };
        throw HeapError(concat("rank ", address.rank, " has its window on ", kind(address), ", rank ",
                               mine.rank, " on ", kind(mine), "; use one kind of device on all ranks."));
    }
    if (mine.is_device()) {
        group.passing = choose_passing(group.ranks, mine);
    } else {
        check_one_machine(group.ranks, "the cpu backend shares the memory of one");
    }
    for (const HeapAddress& address : group.ranks) {
        if (address.fixed_bytes != mine.fixed_bytes || address.arena_bytes != mine.arena_bytes) {
            throw HeapError(concat("rank ", address.rank, " has a window of ", address.fixed_bytes, " + ",
                                   address.arena_bytes, " bytes (fixed_bytes + arena_bytes), rank ",
                                   mine.rank, " of ", mine.fixed_bytes, " + ", mine.arena_bytes,
                                   "; pass equal sizes (also MOK_ARENA_BYTES) on all ranks."));
        }
    }
    if (!mine.is_device()) check_users(group.ranks, mine);
    return group;
}

}  // namespace mok
