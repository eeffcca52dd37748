// Everything a kernel may ask of the machine. On the device it is inline PTX; in the emulator (csrc/emu) the
// same names act on an emulated machine. Some (bulk reductions, cache hints, clusters, match_any, a wait for
// either of two mbarriers) no kernel calls yet: they are part of the interface for kernels to come, and
// csrc/kernels/*ptx_test*.cuh test them on both sides.
#pragma once

#if defined(__CUDACC__)

#include "csrc/ptx/device/barrier.cuh"
#include "csrc/ptx/device/bulk.cuh"
#include "csrc/ptx/device/cluster.cuh"
#include "csrc/ptx/device/convert.cuh"
#include "csrc/ptx/device/deadline.cuh"
#include "csrc/ptx/device/fence.cuh"
#include "csrc/ptx/device/flag.cuh"
#include "csrc/ptx/device/global.cuh"
#include "csrc/ptx/device/matrix.cuh"
#include "csrc/ptx/device/mbarrier.cuh"
#include "csrc/ptx/device/setmaxnreg.cuh"
#include "csrc/ptx/device/shared.cuh"
#include "csrc/ptx/device/special.cuh"
#include "csrc/ptx/device/tma.cuh"
#include "csrc/ptx/device/warp.cuh"
#include "csrc/ptx/device/wgmma.cuh"

#elif defined(MOK_EMULATOR)

#include "csrc/ptx/host/barrier.h"
#include "csrc/ptx/host/bulk.h"
#include "csrc/ptx/host/cluster.h"
#include "csrc/ptx/host/convert.h"
#include "csrc/ptx/host/deadline.h"
#include "csrc/ptx/host/fence.h"
#include "csrc/ptx/host/flag.h"
#include "csrc/ptx/host/global.h"
#include "csrc/ptx/host/matrix.h"
#include "csrc/ptx/host/mbarrier.h"
#include "csrc/ptx/host/setmaxnreg.h"
#include "csrc/ptx/host/shared.h"
#include "csrc/ptx/host/special.h"
#include "csrc/ptx/host/tma.h"
#include "csrc/ptx/host/warp.h"
#include "csrc/ptx/host/wgmma.h"

#else
#error "csrc/ptx/ptx.h is for CUDA sources, and for the emulator's, which define MOK_EMULATOR."
#endif
