// Everything a kernel may ask of the machine. On the device it is inline PTX.
#pragma once

#if !defined(__CUDACC__)
#error "csrc/ptx/ptx.h is for CUDA sources: the host has no implementation of these wrappers."
#endif

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
