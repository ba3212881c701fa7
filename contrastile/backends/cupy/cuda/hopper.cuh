// sm_90a instructions: mbarriers, bulk tensor copies, warpgroup products, clusters. Addresses are 32-bit shared ones.
//
// Hazard: scope qualifiers are not free. A release at cluster scope on an arrival compiles to a fence of the whole GPU, an
// acquire on a wait to an invalidation of L1, in each step. Only the copy engine and wgmma read and write the data that
// passes between the roles, and mbarriers order those by themselves. So no arrival and no wait has a qualifier.
#pragma once

#include "arguments.cuh"
#include "elements.cuh"

namespace contrastile {

__device__ __forceinline__ unsigned shared_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// ---- mbarriers

__device__ __forceinline__ void barrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Arrives, and announces the bytes of the copies to come.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier of the same address in another block of the cluster.
__device__ __forceinline__ void barrier_arrive(unsigned barrier, unsigned block) {
    asm volatile(
        "{\n.reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}" ::"r"(barrier),
        "r"(block)
        : "memory");
}

__device__ __forceinline__ bool barrier_passed(unsigned barrier, unsigned parity) {
    unsigned passed;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}"
        : "=r"(passed)
        : "r"(barrier), "r"(parity)
        : "memory");
    return passed != 0;
}

// Waits until the phase of this parity is complete. With CONTRASTILE_WATCHDOG a wait that does not end traps. Such a
// build is for finding hangs, not for timing: it may spill.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
#ifdef CONTRASTILE_WATCHDOG
    for (int spins = 0; !barrier_passed(barrier, parity); ++spins)
        if (spins > CONTRASTILE_WATCHDOG) __trap();
#else
    while (!barrier_passed(barrier, parity)) {
    }
#endif
}

// ---- named barriers of a block

__device__ __forceinline__ void named_sync(int name, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// Whether `mine` is true in any thread; all wait as in named_sync.
__device__ __forceinline__ bool named_any(int name, int threads, bool mine) {
    int found;
    asm volatile(
        "{\n"
        ".reg .pred mine, any;\n"
        "setp.ne.s32 mine, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, mine;\n"
        "selp.s32 %0, 1, 0, any;\n"
        "}"
        : "=r"(found)
        : "r"(name), "r"(threads), "r"(static_cast<int>(mine))
        : "memory");
    return found != 0;
}

__device__ __forceinline__ void named_arrive(int name, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// ---- bulk tensor copies; x counts along the contiguous dimension

__device__ __forceinline__ void copy_in(unsigned to, const TensorMap& map, int x, int y, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}

// Copies to the same address, with the same barrier, in both blocks of a cluster of two.
__device__ __forceinline__ void copy_in_both(unsigned to, const TensorMap& map, int x, int y, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(&map), "r"(x), "r"(y), "r"(barrier), "h"(static_cast<unsigned short>(3))
        : "memory");
}

// Copies BYTES, a multiple of 16, of a vector. Both addresses are aligned to 16.
template <int BYTES>
__device__ __forceinline__ void copy_vector_in(unsigned to, const void* from, unsigned barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "n"(BYTES), "r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void copy_out(const TensorMap& map, int x, int y, unsigned from) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map), "r"(x),
                 "r"(y), "r"(from)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// Waits until at most LEFT of this thread's copies out still read shared memory.
template <int LEFT>
__device__ __forceinline__ void wait_copies_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(LEFT) : "memory");
}

// Waits until all of this thread's copies out are written.
__device__ __forceinline__ void wait_copies_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Makes ordinary stores to shared memory visible to the copy engine.
__device__ __forceinline__ void publish_to_copies() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- small asynchronous copies into shared memory, which use no register

// Copies BYTES (4 or 8) from `from` if `inside`, else writes zeros and reads nothing.
template <int BYTES>
__device__ __forceinline__ void fetch(unsigned to, const void* from, bool inside) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(to), "l"(from), "n"(BYTES),
                 "r"(inside ? BYTES : 0)
                 : "memory");
}

// Waits until this thread's fetches have arrived.
__device__ __forceinline__ void wait_fetches() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- clusters and registers

__device__ __forceinline__ unsigned cluster_rank() {
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

template <int REGISTERS>
__device__ __forceinline__ void shrink_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

template <int REGISTERS>
__device__ __forceinline__ void grow_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

}  // namespace contrastile
