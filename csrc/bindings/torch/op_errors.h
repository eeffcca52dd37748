// How errors of an op leave it, and reach the peers.
#pragma once

#include <exception>
#include <stdexcept>

#include "csrc/layout/check.h"

namespace mok::bindings {

/// Runs an op. Newer torch turns every exception of a stable-ABI kernel into RuntimeError, so the class goes
/// into the text, from where mok.errors.translate restores it.
template <typename Body>
auto run_op(const Body& body) {
    try {
        return body();
    } catch (const std::invalid_argument& error) {
        throw std::runtime_error(concat("mok.ValueError: ", error.what()));
    }
}

/// What `make` returns; a failure in it, before the call has begun, still reaches the peers: `tell(reason)`.
template <typename Tell, typename Make>
auto telling_peers(const Tell& tell, const Make& make) {
    try {
        return make();
    } catch (const std::exception& error) {
        tell(error.what());
        throw;
    }
}

}  // namespace mok::bindings
