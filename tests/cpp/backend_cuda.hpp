// The CUDA backend behind the interface that the backend tests are written against: operands go to the card with the
// alignment they have on the host, the output (poisoned) comes back.
#pragma once

#include <cuda_runtime.h>

#include <memory>

#include "problem.hpp"
#include "snack/core/cuda.hpp"
#include "snack/core/error.hpp"
#include "snack/kernels/exchange.hpp"
#include "snack/kernels/rewire.hpp"
#include "snack/kernels/select.hpp"

namespace snack::testing::backend {

inline const std::vector<DType> kDTypes = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
inline const std::vector<Regime> kRegimes = {Regime::kStream, Regime::kCoo};
inline const std::vector<int> kThreadCounts = {1};  // means nothing on a card
inline bool is_left_out(int64_t) { return false; }

inline void check(cudaError_t status) { SNACK_CHECK(status == cudaSuccess, "CUDA: ", cudaGetErrorString(status)); }

/// Device memory of a test, exactly as long as it needs to be, so that a sanitizer sees every access beyond it.
class Memory {
 public:
  Memory() = default;
  explicit Memory(int64_t bytes, int64_t offset = 0) {
    check(cudaMalloc(&base_, size_t(bytes + offset + (bytes + offset == 0))));
    data_ = static_cast<char*>(base_) + offset;
  }
  static Memory copy_of(const void* host, int64_t bytes, int64_t offset = 0) {
    Memory m(bytes, offset);
    if (bytes > 0) check(cudaMemcpy(m.data_, host, size_t(bytes), cudaMemcpyHostToDevice));
    return m;
  }
  Memory(Memory&& other) noexcept : base_(std::exchange(other.base_, nullptr)), data_(std::exchange(other.data_, nullptr)) {}
  Memory& operator=(Memory&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(data_, other.data_);
    return *this;
  }
  ~Memory() { cudaFree(base_); }
  void to(void* host, int64_t bytes) const {
    if (bytes > 0) check(cudaMemcpy(host, data_, size_t(bytes), cudaMemcpyDeviceToHost));
  }
  char* data() const { return data_; }

 private:
  void* base_ = nullptr;
  char* data_ = nullptr;
};

inline int64_t misalignment(const void* p) { return int64_t(reinterpret_cast<uintptr_t>(p) % 16); }

class DevicePatternCopy {
 public:
  explicit DevicePatternCopy(const PatternView& p)
      : index_(Memory::copy_of(p.index, p.geometry.nnz * index_bytes(p.geometry.packing))),
        pointers_(Memory::copy_of(p.tile_ptr, p.geometry.pointer_words() * 8)),
        view_{p.geometry, index_.data(), reinterpret_cast<const int64_t*>(pointers_.data())} {}
  const PatternView& view() const { return view_; }

 private:
  Memory index_, pointers_;
  PatternView view_;
};

/// A host matrix's memory on the card; strides as on the host, none of them negative.
class DeviceMatrix {
 public:
  explicit DeviceMatrix(const MatrixView& m) : view_(m) {
    const int64_t elements = m.rows == 0 || m.cols == 0 ? 0 : (m.rows - 1) * m.row_stride + (m.cols - 1) * m.col_stride + 1;
    memory_ = Memory::copy_of(m.data, elements * size_of(m.dtype), misalignment(m.data));
    view_.data = memory_.data();
  }
  const MatrixView& view() const { return view_; }

 private:
  Memory memory_;
  MatrixView view_;
};

template <class Args, class Kernel>
void run(Operation operation, Args args, int64_t batch, Regime regime, void* Args::*output, int64_t output_elements, Kernel kernel) {
  const int64_t bytes = output_elements * size_of(args.dtype);
  void* host = args.*output;
  const Memory result = Memory::copy_of(host, bytes, misalignment(host) / size_of(args.dtype) * size_of(args.dtype));
  args.*output = result.data();
  const Plan plan = make_cuda_plan({operation, args.pattern.geometry, batch, args.dtype}, regime, cuda::capability(cuda::current_device()));
  const Memory workspace(plan.workspace_bytes);
  check(cudaMemset(workspace.data(), 0xff, size_t(plan.workspace_bytes)));
  cudaStream_t stream;
  check(cudaStreamCreate(&stream));
  kernel(args, plan, cuda::Resources{stream, workspace.data(), plan.workspace_bytes});
  check(cudaStreamSynchronize(stream));
  check(cudaStreamDestroy(stream));
  result.to(host, bytes);
}

inline void spmm(SpmmArgs args, Regime regime, int) {
  const Geometry& g = args.pattern.geometry;
  const int64_t element = size_of(args.dtype);
  const DevicePatternCopy pattern(args.pattern);
  const Memory values = Memory::copy_of(args.values, g.nnz * element, misalignment(args.values));
  const Memory bias = Memory::copy_of(args.bias, args.bias == nullptr ? 0 : g.out * element);
  const DeviceMatrix x(args.x);
  args.pattern = pattern.view(), args.values = values.data(), args.x = x.view();
  if (args.bias != nullptr) args.bias = bias.data();
  run(Operation::kSpmm, args, args.x.rows, regime, &SpmmArgs::y, args.x.rows * g.out, cuda::spmm);
}

inline void spmm_t(SpmmTArgs args, Regime regime, int) {
  const Geometry& g = args.pattern.geometry;
  const DevicePatternCopy pattern(args.pattern);
  const Memory values = Memory::copy_of(args.values, g.nnz * size_of(args.dtype), misalignment(args.values));
  const DeviceMatrix dy(args.dy);
  args.pattern = pattern.view(), args.values = values.data(), args.dy = dy.view();
  run(Operation::kSpmmT, args, args.dy.rows, regime, &SpmmTArgs::dx, args.dy.rows * g.in, cuda::spmm_t);
}

inline void sddmm(SddmmArgs args, Regime regime, int) {
  const Geometry& g = args.pattern.geometry;
  const DevicePatternCopy pattern(args.pattern);
  const DeviceMatrix dy(args.dy), x(args.x);
  args.pattern = pattern.view(), args.dy = dy.view(), args.x = x.view();
  run(Operation::kSddmm, args, args.x.rows, regime, &SddmmArgs::dvalues, g.nnz, cuda::sddmm);
}

/// Values and states come back changed. lr and step may lie on the host.
inline void sddmm_update(SddmmUpdateArgs args, Regime regime, int) {
  const int64_t bytes = args.pattern.geometry.nnz * size_of(args.dtype);
  const DevicePatternCopy pattern(args.pattern);
  const DeviceMatrix dy(args.dy), x(args.x);
  const auto on_card = [&](void* host) { return host == nullptr ? Memory() : Memory::copy_of(host, bytes, misalignment(host)); };
  const auto number = [](const float* host) { return host == nullptr ? Memory() : Memory::copy_of(host, 4); };
  const Memory states[] = {on_card(args.state[0]), on_card(args.state[1])}, lr = number(args.lr), step = number(args.step);
  void* const hosts[] = {args.state[0], args.state[1]};
  args.pattern = pattern.view(), args.dy = dy.view(), args.x = x.view();
  args.state[0] = states[0].data(), args.state[1] = states[1].data();
  args.lr = reinterpret_cast<const float*>(lr.data()), args.step = reinterpret_cast<const float*>(step.data());
  run(Operation::kSddmmUpdate, args, args.x.rows, regime, &SddmmUpdateArgs::values, args.pattern.geometry.nnz, cuda::sddmm_update);
  for (int i = 0; i < 2; ++i)
    if (hosts[i] != nullptr) states[i].to(hosts[i], bytes);
}

/// Workspace of a test: as large as it must be, and full of nonsense.
inline Memory poisoned(int64_t bytes) {
  Memory workspace(bytes);
  check(cudaMemset(workspace.data(), 0xff, size_t(bytes)));
  return workspace;
}

inline std::vector<int64_t> to_list(const Memory& memory, int64_t count) {
  std::vector<int64_t> list(size_t(std::max<int64_t>(0, count)));
  memory.to(list.data(), int64_t(list.size()) * 8);
  return list;
}

inline int64_t* integers(const Memory& memory) { return reinterpret_cast<int64_t*>(memory.data()); }

/// Throws the sentence of a refused choice, as the other backends do.
inline void expect_chosen(const Memory& status, const Geometry& geometry, int64_t k) {
  check(cudaDeviceSynchronize());
  cuda::SelectStatus said;
  status.to(&said, sizeof(said));
  const std::string sentence = cuda::describe(said, geometry, k);
  SNACK_CHECK(sentence.empty(), sentence);
}

inline std::vector<int64_t> select_smallest(SelectArgs args) {
  const Memory values = Memory::copy_of(args.values, args.nnz * size_of(args.dtype), misalignment(args.values));
  args.values = values.data();
  const int64_t bytes = cuda::select_smallest_workspace(args.dtype, args.nnz);
  const Memory workspace = poisoned(bytes), slots(std::min(args.k, args.nnz) * 8), status(sizeof(cuda::SelectStatus));
  cuda::select_smallest(args, integers(slots), reinterpret_cast<cuda::SelectStatus*>(status.data()), {nullptr, workspace.data(), bytes});
  expect_chosen(status, {}, args.k);
  return to_list(slots, args.k);
}

inline Positions grow_uniform(EmptyPositions empty, int64_t k, uint64_t key) {
  const Geometry g = empty.pattern.geometry;
  const DevicePatternCopy pattern(empty.pattern);
  const Memory drop = Memory::copy_of(empty.drop, empty.drops * 8);
  empty.pattern = pattern.view(), empty.drop = integers(drop);
  const int64_t bytes = cuda::grow_uniform_workspace(g, k);
  const int64_t room = std::min(k, g.out * g.in);
  const Memory workspace = poisoned(bytes), rows(room * 8), cols(room * 8), status(sizeof(cuda::SelectStatus));
  cuda::grow_uniform(empty, k, key, integers(rows), integers(cols), reinterpret_cast<cuda::SelectStatus*>(status.data()), {nullptr, workspace.data(), bytes});
  expect_chosen(status, g, k);
  return {to_list(rows, k), to_list(cols, k)};
}

inline Positions grow_gradient(GrowGradientArgs args) {
  const Geometry g = args.empty.pattern.geometry;
  const DevicePatternCopy pattern(args.empty.pattern);
  const Memory drop = Memory::copy_of(args.empty.drop, args.empty.drops * 8);
  const DeviceMatrix dy(args.dy), x(args.x);
  args.empty.pattern = pattern.view(), args.empty.drop = integers(drop), args.dy = dy.view(), args.x = x.view();
  const int64_t bytes = cuda::grow_gradient_workspace(g, args.k, args.x.dtype), room = std::min(args.k, g.out * g.in);
  const Memory workspace = poisoned(bytes), rows(room * 8), cols(room * 8), status(sizeof(cuda::SelectStatus));
  cuda::grow_gradient(args, integers(rows), integers(cols), reinterpret_cast<cuda::SelectStatus*>(status.data()), {nullptr, workspace.data(), bytes});
  expect_chosen(status, g, args.k);
  return {to_list(rows, args.k), to_list(cols, args.k)};
}

/// Index, tile pointers and what is carried come back changed.
inline ExchangeResult exchange(ExchangeArgs args) {
  const Geometry& g = args.geometry;
  const int64_t index_size = g.nnz * index_bytes(g.packing), pointers_size = g.pointer_words() * 8;
  const Memory index = Memory::copy_of(args.index, index_size, misalignment(args.index)), pointers = Memory::copy_of(args.tile_ptr, pointers_size),
               fills = Memory::copy_of(args.fills, args.carried_count * 4), result(sizeof(ExchangeResult));
  std::vector<Memory> memory;
  std::vector<Carried> carried;
  for (int64_t i = 0; i < args.carried_count; ++i) {
    const Carried& host = args.carried[i];
    memory.push_back(Memory::copy_of(host.data, g.nnz * size_of(host.type), misalignment(host.data)));
    carried.push_back({host.type, memory.back().data()});
  }
  const DeviceMatrix dy(args.dy), x(args.x);
  const ExchangeArgs host = args;
  args.index = index.data(), args.tile_ptr = integers(pointers), args.fills = reinterpret_cast<const float*>(fills.data()), args.carried = carried.data();
  args.dy = dy.view(), args.x = x.view();
  const int64_t bytes = cuda::exchange_workspace(args);
  const Memory workspace = poisoned(bytes);
  cuda::exchange(args, reinterpret_cast<ExchangeResult*>(result.data()), {nullptr, workspace.data(), bytes});
  check(cudaDeviceSynchronize());
  ExchangeResult said;
  result.to(&said, sizeof(said));
  index.to(host.index, index_size);
  pointers.to(host.tile_ptr, pointers_size);
  for (size_t i = 0; i < memory.size(); ++i) memory[i].to(host.carried[i].data, g.nnz * size_of(host.carried[i].type));
  return said;
}

/// Throws the sentence of a refused edit, as the other backends do.
inline RewireResult rewire(RewireArgs args) {
  const Geometry before = args.pattern.geometry, after = make_geometry(before.out, before.in, before.nnz - args.drops + args.grows);
  const DevicePatternCopy pattern(args.pattern);
  const Memory drop = Memory::copy_of(args.drop, args.drops * 8), rows = Memory::copy_of(args.grow_rows, args.grows * 8),
               cols = Memory::copy_of(args.grow_cols, args.grows * 8);
  args.pattern = pattern.view();
  args.drop = reinterpret_cast<const int64_t*>(drop.data());
  args.grow_rows = reinterpret_cast<const int64_t*>(rows.data()), args.grow_cols = reinterpret_cast<const int64_t*>(cols.data());

  RewireResult result;
  result.pattern.geometry = after;
  result.pattern.index.resize(size_t(after.nnz * index_bytes(after.packing)));
  result.pattern.tile_ptr.resize(size_t(after.pointer_words()));
  result.source.resize(size_t(after.nnz));
  const int64_t bytes = cuda::rewire_workspace(before, args.drops, args.grows);
  const Memory index(int64_t(result.pattern.index.size())), pointers(after.pointer_words() * 8), source(after.nnz * 8), status(sizeof(cuda::RewireStatus)),
      workspace(bytes);
  cuda::rewire(args, {after, index.data(), reinterpret_cast<int64_t*>(pointers.data()), reinterpret_cast<int64_t*>(source.data()),
                      reinterpret_cast<cuda::RewireStatus*>(status.data())}, {nullptr, workspace.data(), bytes});
  check(cudaDeviceSynchronize());
  cuda::RewireStatus said;
  status.to(&said, sizeof(said));
  const std::string sentence = cuda::describe(said, before);
  SNACK_CHECK(sentence.empty(), sentence);
  index.to(result.pattern.index.data(), int64_t(result.pattern.index.size()));
  pointers.to(result.pattern.tile_ptr.data(), after.pointer_words() * 8);
  source.to(result.source.data(), after.nnz * 8);
  return result;
}

}  // namespace snack::testing::backend
