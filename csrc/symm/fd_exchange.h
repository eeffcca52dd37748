// Passes one memory descriptor per rank to every peer: SCM_RIGHTS over abstract UNIX sockets.
//
// The listener exists before its address is published, so a peer's connect succeeds at once or the peer is
// gone; a slow peer's side of the connection waits in its backlog. Each side checks the other's user by
// SO_PEERCRED; a client also shows the token of the address (abstract names are visible to every user). One
// thread serves and fetches in a poll loop. SEQPACKET keeps messages whole.
#pragma once

#include <string>
#include <vector>

#include "csrc/symm/address.h"
#include "csrc/symm/unique_fd.h"

namespace mok {

class FdExchange {
  public:
    /// Opens the listener and fills in address.socket and address.token.
    explicit FdExchange(HeapAddress& address);

    /// Hands `fd` to the other ranks and returns theirs (the own place stays empty). Returns only after all
    /// peers fetched ours. Throws HeapError naming the ranks that are missing after timeout_s.
    std::vector<UniqueFd> exchange(int fd, const std::vector<HeapAddress>& addresses, double timeout_s);

  private:
    struct Fetch {
        int rank;
        UniqueFd socket;
        bool asked = false;
    };

    void accept_client();
    void serve_client(UniqueFd& client, int fd);
    /// Connects and asks where that is still to do; takes the descriptor once it is there. True when done.
    bool advance(Fetch& fetch, const HeapAddress& peer, bool readable, UniqueFd& received);

    HeapAddress mine_;
    UniqueFd listener_;
    std::vector<UniqueFd> clients_;
    std::vector<bool> served_;
};

}  // namespace mok
