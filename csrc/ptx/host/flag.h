// csrc/ptx/device/flag.cuh on the emulated machine. Mutation leaves out the order of an access, never the
// access.
#pragma once

#include "csrc/ptx/host/base.h"

namespace mok::ptx {

namespace flag_detail {

inline constexpr emu::Access kReads{true, false, emu::Scope::kNone};
inline constexpr emu::Access kWrites{false, true, emu::Scope::kNone};
inline constexpr emu::Access kBoth{true, true, emu::Scope::kNone};

inline emu::FlagOrder order_of(const char* wrapper, emu::Scope scope, bool acquires, bool releases,
                               Site site) {
    if ((acquires || releases) && emu::is_left_out(wrapper, site)) return {false, false, scope};
    return {acquires, releases, scope};
}

template <typename T>
T load(const char* wrapper, const T* flag, emu::Scope scope, bool acquires, Site site) {
    emu::enter(wrapper, site);
    const emu::FlagOrder order = order_of(wrapper, scope, acquires, false, site);
    T value;
    memcpy(&value, emu::flag_access(flag, sizeof(T), kReads, order), sizeof(T));
    return value;
}

template <typename T>
void store(const char* wrapper, T* flag, T value, emu::Scope scope, bool releases, Site site) {
    emu::enter(wrapper, site);
    const emu::FlagOrder order = order_of(wrapper, scope, false, releases, site);
    memcpy(emu::flag_access(flag, sizeof(T), kWrites, order), &value, sizeof(T));
    emu::flag_written(flag, false, order);
}

/// Sets the flag to `change` of what it holds; returns that. A red does not acquire, an atom may.
template <typename T, typename Change>
T change(const char* wrapper, T* flag, emu::Scope scope, bool is_red, bool is_ordered, Change change,
         Site site) {
    emu::enter(wrapper, site);
    const emu::FlagOrder order = order_of(wrapper, scope, is_ordered && !is_red, is_ordered, site);
    uint8_t* place = emu::flag_access(flag, sizeof(T), is_red ? kWrites : kBoth, order);
    T before;
    memcpy(&before, place, sizeof(T));
    const T after = change(before);
    memcpy(place, &after, sizeof(T));
    emu::flag_written(flag, true, order);
    return before;
}

}  // namespace flag_detail

// One definition per scope and width.
#define MOK_FLAG_WRAPPERS(SCOPE, KSCOPE, T)                                                               \
    MOK_DEVICE T ld_relaxed_##SCOPE(const T* flag, Site site = Site::current()) {                         \
        return flag_detail::load("ld_relaxed_" #SCOPE, flag, KSCOPE, false, site);                        \
    }                                                                                                     \
    MOK_DEVICE T ld_acquire_##SCOPE(const T* flag, Site site = Site::current()) {                         \
        return flag_detail::load("ld_acquire_" #SCOPE, flag, KSCOPE, true, site);                         \
    }                                                                                                     \
    MOK_DEVICE void st_relaxed_##SCOPE(T* flag, T value, Site site = Site::current()) {                   \
        flag_detail::store("st_relaxed_" #SCOPE, flag, value, KSCOPE, false, site);                       \
    }                                                                                                     \
    MOK_DEVICE void st_release_##SCOPE(T* flag, T value, Site site = Site::current()) {                   \
        flag_detail::store("st_release_" #SCOPE, flag, value, KSCOPE, true, site);                        \
    }                                                                                                     \
    MOK_DEVICE void red_relaxed_##SCOPE##_add(T* flag, T value, Site site = Site::current()) {            \
        flag_detail::change(                                                                              \
            "red_relaxed_" #SCOPE "_add", flag, KSCOPE, true, false,                                      \
            [value](T before) { return before + value; }, site);                                          \
    }                                                                                                     \
    MOK_DEVICE void red_release_##SCOPE##_add(T* flag, T value, Site site = Site::current()) {            \
        flag_detail::change(                                                                              \
            "red_release_" #SCOPE "_add", flag, KSCOPE, true, true,                                       \
            [value](T before) { return before + value; }, site);                                          \
    }                                                                                                     \
    MOK_DEVICE T atom_relaxed_##SCOPE##_add(T* flag, T value, Site site = Site::current()) {              \
        return flag_detail::change(                                                                       \
            "atom_relaxed_" #SCOPE "_add", flag, KSCOPE, false, false,                                    \
            [value](T before) { return before + value; }, site);                                          \
    }                                                                                                     \
    MOK_DEVICE T atom_acq_rel_##SCOPE##_add(T* flag, T value, Site site = Site::current()) {              \
        return flag_detail::change(                                                                       \
            "atom_acq_rel_" #SCOPE "_add", flag, KSCOPE, false, true,                                     \
            [value](T before) { return before + value; }, site);                                          \
    }                                                                                                     \
    MOK_DEVICE T atom_relaxed_##SCOPE##_exchange(T* flag, T value, Site site = Site::current()) {         \
        return flag_detail::change(                                                                       \
            "atom_relaxed_" #SCOPE "_exchange", flag, KSCOPE, false, false, [value](T) { return value; }, \
            site);                                                                                        \
    }

MOK_FLAG_WRAPPERS(gpu, emu::Scope::kGpu, uint32_t)
MOK_FLAG_WRAPPERS(gpu, emu::Scope::kGpu, uint64_t)
MOK_FLAG_WRAPPERS(sys, emu::Scope::kSys, uint32_t)
MOK_FLAG_WRAPPERS(sys, emu::Scope::kSys, uint64_t)

#undef MOK_FLAG_WRAPPERS

}  // namespace mok::ptx
