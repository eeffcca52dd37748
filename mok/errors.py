"""What can go wrong between ranks, as exceptions."""


class SymmetricHeapError(RuntimeError):
    """A rank's window of shared memory could not be created, enlarged or exchanged."""


class PeersNotLocalError(SymmetricHeapError):
    """The ranks of a group cannot map each other's memory: several hosts, or one container each.

    Raised on all ranks of the group alike, so that all can take another backend together.
    """


class PeerTimeoutError(RuntimeError):
    """A peer did not arrive within the time set (`MOK_TIMEOUT_S`); the message names it."""


class PeerAbortedError(RuntimeError):
    """A peer raised and left the call, or gave up on this rank; the message has its reason."""


class WorkspaceClosedError(RuntimeError):
    """A workspace was used after `close()`, or in a process forked from the one that owns it."""


_CLASSES = (
    ValueError,
    PeersNotLocalError,
    SymmetricHeapError,
    PeerTimeoutError,
    PeerAbortedError,
    WorkspaceClosedError,
)


def translate(error: Exception) -> Exception:
    """Restores the class of a C++ error that crossed torch's dispatcher as a `RuntimeError`.

    Returns a new exception with `error` as its cause, or `error` itself if it is none of mok's.
    """
    if type(error) is not RuntimeError:
        return error
    text = str(error)
    for cls in _CLASSES:
        _, prefix, message = text.partition(f"mok.{cls.__name__}: ")
        if prefix:
            # Whatever torch adds behind (a C++ stack) starts on a line of its own.
            translated = cls(message.partition("\nException raised from ")[0].rstrip())
            translated.__cause__ = error
            return translated
    return error
