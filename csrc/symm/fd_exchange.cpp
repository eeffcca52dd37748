#include "csrc/symm/fd_exchange.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>

#include "csrc/comm/errors.h"
#include "csrc/comm/interrupt.h"
#include "csrc/comm/peer_comm.h"
#include "csrc/layout/check.h"

namespace mok {
namespace {

struct Hello {
    char magic[8];
    char token[32];
    int32_t rank;
};

constexpr char kMagic[8] = {'m', 'o', 'k', 'h', 'e', 'a', 'p', '1'};
constexpr int kPollMilliseconds = 50;

socklen_t fill_socket_name(const std::string& name, sockaddr_un& target) {
    target = {};
    target.sun_family = AF_UNIX;
    const size_t bytes = std::min(name.size(), sizeof(target.sun_path) - 1);
    memcpy(target.sun_path + 1, name.data(), bytes);
    return static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + bytes);
}

UniqueFd open_socket() {
    UniqueFd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) {
        throw HeapError(concat("socket(AF_UNIX) failed: ", strerror(errno),
                               "; raise the limit of open files (ulimit -n) if there are too many."));
    }
    return fd;
}

int64_t peer_uid(int socket) {
    ucred credentials{};
    socklen_t bytes = sizeof(credentials);
    if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &bytes) != 0) return -1;
    return static_cast<int64_t>(credentials.uid);
}

bool send_descriptor(int socket, int fd) {
    char byte = 'w';
    iovec payload{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(header), &fd, sizeof(int));
    return sendmsg(socket, &message, MSG_NOSIGNAL) == 1;
}

/// An empty descriptor if the peer closed the connection without sending one.
UniqueFd receive_descriptor(int socket) {
    char byte = 0;
    iovec payload{&byte, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr message{};
    message.msg_iov = &payload;
    message.msg_iovlen = 1;
    message.msg_control = control;
    message.msg_controllen = sizeof(control);
    if (recvmsg(socket, &message, MSG_CMSG_CLOEXEC) != 1) return {};
    const cmsghdr* header = CMSG_FIRSTHDR(&message);
    if (header == nullptr || header->cmsg_type != SCM_RIGHTS || header->cmsg_len != CMSG_LEN(sizeof(int)))
        return {};
    int fd = -1;
    memcpy(&fd, CMSG_DATA(header), sizeof(int));
    return UniqueFd(fd);
}

std::vector<int> ranks_where(const std::vector<bool>& done, int me) {
    std::vector<int> ranks;
    for (size_t r = 0; r < done.size(); ++r) {
        if (!done[r] && static_cast<int>(r) != me) ranks.push_back(static_cast<int>(r));
    }
    return ranks;
}

}  // namespace

FdExchange::FdExchange(HeapAddress& address) : listener_(open_socket()) {
    address.socket = "mok-" + random_name();
    address.token = random_name();
    mine_ = address;
    served_.assign(static_cast<size_t>(mine_.num_ranks), false);
    sockaddr_un target;
    const socklen_t bytes = fill_socket_name(address.socket, target);
    if (bind(listener_.get(), reinterpret_cast<sockaddr*>(&target), bytes) != 0 ||
        listen(listener_.get(), 2 * mine_.num_ranks) != 0) {
        throw HeapError(concat("rank ", mine_.rank, " cannot listen on an abstract UNIX socket: ",
                               strerror(errno), "; use backend=\"collective\" if this system forbids them."));
    }
}

void FdExchange::accept_client() {
    UniqueFd client(accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    // Another user's process that found the name in /proc/net/unix is hung up on; it is no rank of ours.
    if (client && peer_uid(client.get()) == mine_.uid) clients_.push_back(std::move(client));
}

void FdExchange::serve_client(UniqueFd& client, int fd) {
    Hello hello{};
    const bool whole = recv(client.get(), &hello, sizeof(hello), 0) == static_cast<ssize_t>(sizeof(hello));
    const bool known = whole && memcmp(hello.magic, kMagic, sizeof(kMagic)) == 0 &&
                       mine_.token.compare(0, std::string::npos, hello.token, sizeof(hello.token)) == 0 &&
                       hello.rank >= 0 && hello.rank < mine_.num_ranks;
    if (known && send_descriptor(client.get(), fd)) served_[static_cast<size_t>(hello.rank)] = true;
    client.reset();
}

bool FdExchange::advance(Fetch& fetch, const HeapAddress& peer, bool readable, UniqueFd& received) {
    if (!fetch.asked) {
        sockaddr_un target;
        const socklen_t bytes = fill_socket_name(peer.socket, target);
        if (connect(fetch.socket.get(), reinterpret_cast<sockaddr*>(&target), bytes) != 0) {
            if (errno == EAGAIN || errno == EINTR) return false;  // its backlog is full
            throw HeapError(concat("rank ", mine_.rank, " cannot reach rank ", peer.rank, " (process ",
                                   peer.pid, "): ", strerror(errno),
                                   "; the process died or gave up after it published its "
                                   "address: see its own output."));
        }
        if (peer_uid(fetch.socket.get()) != mine_.uid) {
            throw HeapError(
                concat("the socket of rank ", peer.rank, " belongs to user ", peer_uid(fetch.socket.get()),
                       ", rank ", mine_.rank, " runs as user ", mine_.uid,
                       "; memory is shared within one user only: start all ranks as the same user."));
        }
        Hello hello{};
        memcpy(hello.magic, kMagic, sizeof(kMagic));
        memcpy(hello.token, peer.token.data(), std::min(peer.token.size(), sizeof(hello.token)));
        hello.rank = mine_.rank;
        if (send(fetch.socket.get(), &hello, sizeof(hello), MSG_NOSIGNAL) < 0 && errno != EPIPE) return false;
        fetch.asked = true;
        return false;
    }
    if (!readable) return false;
    received = receive_descriptor(fetch.socket.get());
    if (!received) {
        throw HeapError(
            concat("rank ", peer.rank, " (process ", peer.pid, ") hung up on rank ", mine_.rank,
                   " instead of sending its window; it failed or does not belong to this group: see its "
                   "own output."));
    }
    return true;
}

std::vector<UniqueFd> FdExchange::exchange(int fd, const std::vector<HeapAddress>& addresses,
                                           double timeout_s) {
    const auto start = std::chrono::steady_clock::now();
    const auto num_ranks = static_cast<size_t>(mine_.num_ranks);
    std::vector<UniqueFd> received(num_ranks);
    std::vector<bool> fetched(num_ranks, false);
    std::vector<Fetch> fetches;
    for (int r = 0; r < mine_.num_ranks; ++r) {
        if (r != mine_.rank) fetches.push_back(Fetch{r, open_socket()});
    }
    while (true) {
        std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
        for (const UniqueFd& client : clients_) polled.push_back({client.get(), POLLIN, 0});
        const size_t first_fetch = polled.size();
        for (const Fetch& fetch : fetches) {
            // A socket that is not connected yet would report a hang-up at once and make this loop spin.
            polled.push_back({fetch.asked ? fetch.socket.get() : -1, POLLIN, 0});
        }
        const bool all_asked =
            std::all_of(fetches.begin(), fetches.end(), [](const Fetch& f) { return f.asked; });
        const int events = poll(polled.data(), polled.size(), all_asked ? kPollMilliseconds : 1);
        if (events < 0 && errno == EINTR && interrupted()) throw HeapError("interrupted by a signal");
        if (events <= 0) {
            for (pollfd& entry : polled) entry.revents = 0;
        }
        for (size_t i = 0; i + 1 < first_fetch; ++i) {
            if (polled[i + 1].revents != 0) serve_client(clients_[i], fd);
        }
        std::erase_if(clients_, [](const UniqueFd& client) { return !client; });
        if (polled[0].revents != 0) accept_client();
        for (size_t i = 0; i < fetches.size(); ++i) {
            const auto r = static_cast<size_t>(fetches[i].rank);
            fetched[r] = advance(fetches[i], addresses[r], polled[first_fetch + i].revents != 0, received[r]);
        }
        std::erase_if(fetches, [&](const Fetch& fetch) { return fetched[static_cast<size_t>(fetch.rank)]; });

        const std::vector<int> not_fetched = ranks_where(fetched, mine_.rank);
        const std::vector<int> not_served = ranks_where(served_, mine_.rank);
        if (not_fetched.empty() && not_served.empty()) return received;
        const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
        if (waited.count() > timeout_s) {
            throw HeapError(
                concat("rank ", mine_.rank, " waited ", timeout_s, " s for ",
                       name_ranks(not_fetched.empty() ? not_served : not_fetched),
                       not_fetched.empty() ? " to fetch its window" : " to send the window",
                       "; all ranks of the group must create the workspace together (MOK_TIMEOUT_S sets "
                       "the time)."));
        }
    }
}

}  // namespace mok
