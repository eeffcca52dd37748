// What goes wrong between ranks. The class name leads the text, so that the Python side can restore the type
// of an error that crossed torch's dispatcher as a bare RuntimeError (`mok.errors.translate`).
#pragma once

#include <stdexcept>
#include <string>

namespace mok {

/// A peer did not arrive within the time set; the text names it.
struct PeerTimeout : std::runtime_error {
    explicit PeerTimeout(const std::string& text) : std::runtime_error("mok.PeerTimeoutError: " + text) {}
};

/// A peer left the call and said why, or peers gave up on this rank.
struct PeerAborted : std::runtime_error {
    explicit PeerAborted(const std::string& text) : std::runtime_error("mok.PeerAbortedError: " + text) {}
};

/// The workspace was closed, or belongs to the process that this one was forked from.
struct WorkspaceClosed : std::runtime_error {
    explicit WorkspaceClosed(const std::string& text)
        : std::runtime_error("mok.WorkspaceClosedError: " + text) {}
};

/// The ranks cannot map each other's memory (several hosts, or one container per rank). Every rank of the
/// group gets it, so that all can take another backend together.
struct PeersNotLocal : std::runtime_error {
    explicit PeersNotLocal(const std::string& text) : std::runtime_error("mok.PeersNotLocalError: " + text) {}
};

/// A window could not be created or exchanged.
struct HeapError : std::runtime_error {
    explicit HeapError(const std::string& text) : std::runtime_error("mok.SymmetricHeapError: " + text) {}
};

}  // namespace mok
