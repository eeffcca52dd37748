#include "csrc/symm/device_mapping.h"

#include "csrc/comm/errors.h"

#if defined(MOK_WITH_CUDA)

#include <algorithm>
#include <cstring>

#include "csrc/layout/check.h"
#include "csrc/symm/device_memory.h"
#include "csrc/symm/scratch.h"

namespace mok {
namespace {

class CudaMapping final : public DeviceMapping {
  public:
    CudaMapping(std::shared_ptr<CudaContext> context, const ShareKinds& kinds, int rank, int num_ranks,
                int64_t stride)
        : DeviceMapping(stride, num_ranks),
          context_(std::move(context)),
          kinds_(kinds),
          rank_(rank),
          mapped_(static_cast<size_t>(num_ranks), false),
          who_(rank == kAllRanks ? std::string("this process") : concat("rank ", rank)) {
        offer_.gpu = context_->name();
        offer_.uuid = context_->uuid();
        offer_.wanted = kinds.wanted;
        offer_.has_fd = kinds.posix_fd;
        const FabricDomain domain = kinds.fabric ? fabric_domain(context_->uuid()) : FabricDomain{};
        offer_.cluster = domain.cluster;
        offer_.clique = domain.clique;
        for (int other : devices_by_access(*context_, false)) offer_.unreachable += cuda_uuid(other) + ",";
    }

    ~CudaMapping() override {
        if (!is_ours()) return;
        const CudaContext::Scope scope(*context_);
        // Without a context, at the end of the process, there is nothing left to give back.
        if (!scope) return;
        const CudaDriver& driver = context_->driver();
        driver.cuCtxSynchronize();
        unmap_all_but(-1);
        release_own();
        const auto base = reinterpret_cast<CUdeviceptr>(base_);
        if (base != 0 && is_plain()) driver.cuMemFree(base);
        if (base != 0 && !is_plain()) driver.cuMemAddressFree(base, reserved_bytes());
        if (records_ != nullptr) driver.cuMemFreeHost(records_);
        if (stream_ != nullptr) driver.cuStreamDestroy(stream_);
    }

    /// Throws HeapError; what was taken until then goes with the object.
    void create(int64_t zero_bytes) {
        const CudaContext::Scope scope(*context_);
        const CudaDriver& driver = context_->driver();
        check(driver.cuStreamCreate(&stream_, CU_STREAM_NON_BLOCKING), "create a stream");
        create_records();
        if (is_plain()) {
            CUdeviceptr base = 0;
            const CUresult result = driver.cuMemAlloc(&base, static_cast<size_t>(stride_));
            if (result != CUDA_SUCCESS) throw_no_device_memory(*context_, who_, stride_, result);
            base_ = reinterpret_cast<char*>(base);
        } else {
            CUdeviceptr base = 0;
            const CUresult result =
                driver.cuMemAddressReserve(&base, reserved_bytes(), kinds_.granularity, 0, 0);
            if (result != CUDA_SUCCESS) {
                throw HeapError(concat(who_, " cannot reserve ", reserved_bytes(), " bytes of addresses for ",
                                       num_windows_, " windows on ", context_->name(), ": ", describe(result),
                                       "; lower max_tokens or MOK_ARENA_BYTES."));
            }
            base_ = reinterpret_cast<char*>(base);
            for (int window = 0; window < num_windows_; ++window) {
                if (rank_ != kAllRanks && window != rank_) continue;
                own_ = create_allocation(*context_, kinds_, who_, stride_);
                map_own(window);
            }
            if (kinds_.fabric) offer_.fabric = export_fabric(*context_, own_, who_);
        }
        // Before the address is published: a peer may write as soon as it has mapped the window.
        if (poison_requested()) zero_bytes = std::min(zero_bytes, control_block_bytes(num_windows_));
        for (int window = 0; window < num_windows_; ++window) {
            if (rank_ != kAllRanks && window != rank_) continue;
            if (poison_requested()) {
                check(driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(this->window(window)), 0xff,
                                             static_cast<size_t>(stride_), stream_),
                      "poison its window");
            }
            check(driver.cuMemsetD8Async(reinterpret_cast<CUdeviceptr>(this->window(window)), 0,
                                         static_cast<size_t>(zero_bytes), stream_),
                  "zero its window");
        }
        check(driver.cuStreamSynchronize(stream_), "zero its window");
    }

    const DeviceOffer& offer() const override { return offer_; }
    const char* backing() const override { return backing_; }
    int device() const override { return context_->ordinal(); }

    UniqueFd export_fd() override {
        const CudaContext::Scope scope(*context_);
        return mok::export_fd(*context_, own_, who_);
    }

    void map_fd(int window, UniqueFd fd, const std::string& peer) override {
        // The driver takes the number of the descriptor in place of a pointer.
        void* handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd.get()));
        import_window(window, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, peer);
        backing_ = "posix_fd";
    }

    void map_fabric(int window, const std::string& text, const std::string& peer) override {
        CUmemFabricHandle handle = parse_fabric(text, peer);
        import_window(window, &handle, CU_MEM_HANDLE_TYPE_FABRIC, peer);
        backing_ = "fabric";
    }

    void finish() override {
        // A fabric handle is good for as long as the allocation it came from; peers may be late.
        if (offer_.fabric.empty()) release_own();
    }

    // A window has all of its memory from the start.
    void take_memory(char*, int64_t) override {}
    void give_memory_back(char*, int64_t) override {}

    void keep_only(char*, int64_t) override {
        if (!is_ours() || rank_ == kAllRanks || is_plain()) return;
        const CudaContext::Scope scope(*context_);
        if (!scope) return;
        context_->driver().cuCtxSynchronize();
        unmap_all_but(rank_);
    }

    void copy_in(char* to, const void* from, int64_t bytes) override {
        const CudaContext::Scope scope(*context_);
        const CudaDriver& driver = context_->driver();
        check(driver.cuMemcpyHtoDAsync(reinterpret_cast<CUdeviceptr>(to), from, static_cast<size_t>(bytes),
                                       stream_),
              "write to a window");
        check(driver.cuStreamSynchronize(stream_), "write to a window");
    }

    void copy_out(void* to, const char* from, int64_t bytes) override {
        const CudaContext::Scope scope(*context_);
        const CudaDriver& driver = context_->driver();
        check(driver.cuMemcpyDtoHAsync(to, reinterpret_cast<CUdeviceptr>(from), static_cast<size_t>(bytes),
                                       stream_),
              "read a window");
        check(driver.cuStreamSynchronize(stream_), "read a window");
    }

    std::shared_ptr<void> allocate(int64_t bytes) override {
        const CudaContext::Scope scope(*context_);
        CUdeviceptr memory = 0;
        const CUresult result = context_->driver().cuMemAlloc(&memory, static_cast<size_t>(bytes));
        if (result != CUDA_SUCCESS) throw_no_device_memory(*context_, who_, bytes, result);
        return std::shared_ptr<void>(reinterpret_cast<void*>(memory), [context = context_](void* pointer) {
            const CudaContext::Scope scope(*context);
            if (scope) context->driver().cuMemFree(reinterpret_cast<CUdeviceptr>(pointer));
        });
    }

    void synchronize() override {
        const CudaContext::Scope scope(*context_);
        if (scope) context_->driver().cuCtxSynchronize();
    }

    std::shared_ptr<void> make_current() override { return std::make_shared<CudaContext::Scope>(*context_); }

    PeerRecord* host_record(int rank) override { return records_ + (rank_ == kAllRanks ? rank : 0); }
    PeerRecord* device_record(int rank) override { return device_records_ + (rank_ == kAllRanks ? rank : 0); }

  private:
    bool is_plain() const { return num_windows_ == 1; }
    size_t reserved_bytes() const { return static_cast<size_t>(stride_) * static_cast<size_t>(num_windows_); }

    void check(CUresult result, const char* what) const {
        if (result == CUDA_SUCCESS) return;
        throw HeapError(concat(who_, " cannot ", what, " on ", context_->name(), ": ", describe(result),
                               "; see workspace.check() and the first error that this process printed."));
    }

    void create_records() {
        const size_t bytes = sizeof(PeerRecord) * static_cast<size_t>(rank_ == kAllRanks ? num_windows_ : 1);
        const CudaDriver& driver = context_->driver();
        void* records = nullptr;
        const CUresult result =
            driver.cuMemHostAlloc(&records, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
        if (result != CUDA_SUCCESS) {
            throw HeapError(concat(who_, " cannot pin ", bytes, " bytes of host memory: ", describe(result),
                                   "; raise the limit of locked memory (ulimit -l) or free memory."));
        }
        records_ = static_cast<PeerRecord*>(records);
        memset(records, 0, bytes);
        CUdeviceptr address = 0;
        check(driver.cuMemHostGetDevicePointer(&address, records, 0), "map pinned host memory");
        device_records_ = reinterpret_cast<PeerRecord*>(address);
    }

    void map_own(int window) {
        const CUresult result = map_allocation(*context_, this->window(window), stride_, own_);
        if (result == CUDA_SUCCESS) mapped_[static_cast<size_t>(window)] = true;
        // With all ranks in this process nobody else asks for the handle, and the next one takes its place.
        if (rank_ == kAllRanks) release_own();
        if (result != CUDA_SUCCESS) {
            throw HeapError(concat(who_, " cannot map its own window of ", stride_, " bytes on ",
                                   context_->name(), ": ", describe(result),
                                   "; lower max_tokens or MOK_ARENA_BYTES, or use backend=\"collective\"."));
        }
    }

    void import_window(int window, void* handle, CUmemAllocationHandleType kind, const std::string& peer) {
        const CudaContext::Scope scope(*context_);
        import_allocation(*context_, this->window(window), stride_, handle, kind, who_, peer);
        mapped_[static_cast<size_t>(window)] = true;
    }

    void release_own() {
        if (own_ != 0) context_->driver().cuMemRelease(own_);
        own_ = 0;
    }

    void unmap_all_but(int kept) {
        for (int window = 0; window < num_windows_; ++window) {
            if (!mapped_[static_cast<size_t>(window)] || window == kept) continue;
            context_->driver().cuMemUnmap(reinterpret_cast<CUdeviceptr>(this->window(window)),
                                          static_cast<size_t>(stride_));
            mapped_[static_cast<size_t>(window)] = false;
        }
    }

    std::shared_ptr<CudaContext> context_;
    ShareKinds kinds_;
    int rank_;
    std::vector<bool> mapped_;
    std::string who_;
    DeviceOffer offer_;
    const char* backing_ = "memory";
    CUstream stream_ = nullptr;
    CUmemGenericAllocationHandle own_ = 0;
    PeerRecord* records_ = nullptr;
    PeerRecord* device_records_ = nullptr;
};

}  // namespace

std::shared_ptr<DeviceMapping> create_device_mapping(int device, int rank, int num_ranks, int64_t bytes,
                                                     int64_t zero_bytes) {
    auto context = std::make_shared<CudaContext>(device);
    const bool is_shared = num_ranks > 1 && rank != kAllRanks;
    const std::string who = rank == kAllRanks ? std::string("this process") : concat("rank ", rank);
    const ShareKinds kinds = num_ranks > 1 ? choose_kinds(*context, who, is_shared) : ShareKinds{};
    const int64_t stride = round_up(bytes, static_cast<int64_t>(kinds.granularity));
    auto mapping = std::make_shared<CudaMapping>(std::move(context), kinds, rank, num_ranks, stride);
    mapping->create(zero_bytes);
    return mapping;
}

DeviceReport describe_device(int device) {
    DeviceReport report;
    report.device = device;
    try {
        const CudaContext context(device);
        report.gpu = context.name();
        report.uuid = context.uuid();
        report.reachable = devices_by_access(context, true);
        report.unreachable = devices_by_access(context, false);
        const FabricDomain domain = fabric_domain(context.uuid());
        report.cluster = domain.cluster;
        report.clique = domain.clique;
        const ShareKinds kinds = choose_kinds(context, "this process", true);
        // As in a group: a fabric handle is taken if all ranks offer one and lie in one NVLink domain.
        report.backing = kinds.fabric ? "fabric" : "posix_fd";
        report.reason = kinds.reason;
    } catch (const HeapError& error) {
        report.reason = without_class(error.what());
    }
    return report;
}

}  // namespace mok

#else

namespace mok {

namespace {
constexpr const char* kWithoutCuda =
    "this copy of mok was built without CUDA; rebuild it where nvcc is found, or use CPU tensors.";
}

std::shared_ptr<DeviceMapping> create_device_mapping(int, int, int, int64_t, int64_t) {
    throw HeapError(kWithoutCuda);
}

DeviceReport describe_device(int device) {
    DeviceReport report;
    report.device = device;
    report.reason = kWithoutCuda;
    return report;
}

void set_cuda_libraries(const std::string&, const std::string&) {}

}  // namespace mok

#endif  // MOK_WITH_CUDA
