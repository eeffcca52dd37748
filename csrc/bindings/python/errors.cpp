// Throws mok's C++ errors as the classes of mok/errors.py (looked up when thrown: mok.errors needs nothing of
// ours).
#include "csrc/comm/errors.h"

#include <pybind11/pybind11.h>

namespace mok::python {
namespace {

void raise(const char* class_name, const std::exception& error) {
    const std::string text = error.what();
    const std::string prefix = std::string("mok.") + class_name + ": ";
    const std::string shown = text.compare(0, prefix.size(), prefix) == 0 ? text.substr(prefix.size()) : text;
    const pybind11::object type = pybind11::module_::import("mok.errors").attr(class_name);
    PyErr_SetObject(type.ptr(),
                    pybind11::reinterpret_steal<pybind11::object>(
                        PyUnicode_DecodeUTF8(shown.data(), static_cast<Py_ssize_t>(shown.size()), "replace"))
                        .ptr());
}

}  // namespace

void bind_errors(pybind11::module_&) {
    pybind11::register_exception_translator([](std::exception_ptr pointer) {
        try {
            if (pointer) std::rethrow_exception(pointer);
        } catch (const PeerTimeout& error) {
            raise("PeerTimeoutError", error);
        } catch (const PeerAborted& error) {
            raise("PeerAbortedError", error);
        } catch (const WorkspaceClosed& error) {
            raise("WorkspaceClosedError", error);
        } catch (const PeersNotLocal& error) {
            raise("PeersNotLocalError", error);
        } catch (const HeapError& error) {
            raise("SymmetricHeapError", error);
        }
    });
}

}  // namespace mok::python
