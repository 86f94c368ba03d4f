// What a listing of SASS becomes, and the state that its instructions work on: lanes, warps, blocks, clusters, memory.
//
// One direction: decode.cpp makes a Program of a listing; the files of opcodes (integer, floating, control, memory,
// matrix, async) give each instruction its `execute`; `step` runs one instruction of one warp; functional.cpp and
// timing.cpp decide which warp steps next and when asynchronous work lands.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace sass {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i32 = int32_t;
using i64 = int64_t;

constexpr int LANES = 32;
constexpr u32 ALL = 0xffffffffu;
constexpr int RZ = 255, URZ = 63, PT = 7;

struct alignas(64) Lanes {
  u32 v[LANES];
  u32& operator[](int i) { return v[i]; }
  u32 operator[](int i) const { return v[i]; }
};

// ── programs ────────────────────────────────────────────────────────────────────────────────────────────────────────

enum class Pipe : u8 { None, Fma, FmaHeavy, Half, Alu, Fp64, Mufu, Memory, Uniform, Branch, Tensor };

struct Operand {
  enum class Kind : u8 {
    None, Register, Uniform, Predicate, UniformPredicate, Immediate, Constant, Memory, MatrixDescriptor, Label, Special,
    Barrier, Scoreboard, GroupScoreboard,
  };
  Kind kind = Kind::None;
  int index = -1;         // of the register, uniform register, predicate, barrier; of Memory and Constant the register
                          // in the brackets, -1 without one (RZ where it says RZ)
  int uniform = -1;       // Memory, Constant: the uniform register in the brackets
  int bank = 0;           // Constant: c[bank][…]
  int offset = 0;         // Memory, Constant: bytes
  u32 immediate = 0;      // bits, from the instruction's encoding
  bool negate = false, absolute = false, invert = false;
  bool wide = false;      // Memory: the register is one of a pair (R2.64)
  u8 scale = 1;           // Memory: R2.X4
  u8 part = 0;            // 0 whole; 1 H0_H0, 2 H1_H1, 3 H0_H1 (swapped); 4…7 B0…B3; 8 F32, of halves
  int target = -1;        // Label: index of the instruction
  std::string text;       // as the listing has it, modifiers off; Special: SR_TID.X
};

struct Context;
struct Instruction;
enum class Step : u8 {
  Done,     // the warp goes on with the next instruction (or where `jump` said)
  Waiting,  // nothing was done: the instruction is tried again when Warp::wait is satisfied
};
using Execute = Step (*)(Context&, const Instruction&);

struct Instruction {
  int address = 0;              // bytes from the start of the section
  std::string opcode;           // HGMMA.64x128x16.F32
  std::vector<std::string> modifiers;  // behind the first dot
  std::string text;             // the whole instruction, for messages
  std::vector<Operand> operands;
  u64 word[2] = {0, 0};         // its encoding

  int guard = PT;               // predicate before it
  bool guard_negated = false, guard_uniform = false;

  // control word (second 64-bit word, bits 41…61)
  u8 stall = 0, write_barrier = 7, read_barrier = 7, wait_mask = 0, reuse = 0;

  Execute execute = nullptr;    // null: unknown opcode, named in Program::unknown
  Pipe pipe = Pipe::None;
  // what an opcode's `prepare` reads out of modifiers for its `execute`; each opcode says what they mean
  int a = 0, b = 0, c = 0, d = 0;
};

struct Program {
  std::string entry;
  std::vector<Instruction> code;
  std::map<std::string, int> labels;
  std::map<std::string, int> unknown;  // opcode with modifiers → how often it stands there
};

// Opcodes by name. `prepare` checks every modifier and sets `a`…`d`; it returns null for a modifier it does not know.
struct Opcode {
  const char* name;  // without modifiers
  Pipe pipe;
  Execute (*prepare)(Instruction&);
};
// each file of opcodes has one of these, ended by a null name
extern const Opcode INTEGER[], FLOATING[], CONTROL[], MEMORY[], MATRIX[], ASYNC[];
extern const Opcode BITS[], MOVES[], WARPS[], DOUBLE[], HALF[], CONVERT[], ATOMIC[];

// Decodes the section of `entry` in an `nvdisasm -c -hex` listing. Throws Fault where it is not there.
Program decode(std::string_view listing, std::string_view entry);

// True if the instruction has the modifier.
bool has(const Instruction&, std::string_view modifier);
// Removes a modifier from the list still to be explained; true where it was there. `prepare` uses it: what is left at
// the end is unknown.
struct Modifiers {
  std::vector<std::string> left;
  explicit Modifiers(const Instruction& i) : left(i.modifiers) {}
  bool take(std::string_view name);
  bool none_left() const { return left.empty(); }
};

// ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Fault {  // what ends a run; `hung` where nothing could go on
  std::string message;
  bool hung = false;
};

// A piece of global memory. Contents repeat every `period` bytes where less is held than it is long, as for a model,
// which reads drawn inputs of any size; writes to such a piece are dropped.
struct Allocation {
  u64 address = 0, bytes = 0;
  u8* data = nullptr;
  u64 period = 0;  // = bytes where all of it is held
  bool writable = false;
  std::string name;
};

// Where a thread's addresses of the generic space point to, beside global memory: windows no allocation lies in.
constexpr u64 SHARED_WINDOW = 0x7f0000000000ull;    // + the shared address (which has the rank in its cluster in bits 24…)
constexpr u64 LOCAL_WINDOW = 0x7e0000000000ull;
constexpr u64 CONSTANT_WINDOW = 0x7d0000000000ull;  // + offset in bank 0: __grid_constant__ parameters

struct GlobalMemory {
  std::vector<Allocation> allocations;  // by address
  Allocation& find(u64 address, u32 bytes, bool write);  // throws Fault: outside all, or read-only
  void load(u64 address, void* to, u32 bytes);
  void store(u64 address, const void* from, u32 bytes);
  size_t last = 0;
};

// What an instruction did to memory, for whoever times it.
struct Access {
  enum class Space : u8 { None, Shared, Global, Local, Constant };
  Space space = Space::None;
  bool store = false, atomic = false;
  bool asynchronous = false;  // LDGSTS: `addresses` are those it reads
  bool matrix = false;        // LDSM, STSM: each address is a row of 16 bytes
  bool cached = true;         // false: past the L1
  int bytes = 4;              // per lane
  u32 lanes = 0;
  u64 addresses[LANES];
};

// ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Warp;
struct Block;
struct Cluster;

// Work that an instruction began and that ends later: a copy landing, a tensor product. `land` does it; whoever runs the
// warps decides when, but in order within one `queue` of one warp.
struct Completion {
  enum class Queue : u8 { Copy, TensorLoad, TensorStore, Product };
  Queue queue = Queue::Copy;
  Warp* warp = nullptr;
  std::function<void()> land;
  // for timing
  int bytes = 0;             // Copy, TensorLoad, TensorStore: in all; Product: read from shared memory
  int sectors = 0;           // TensorLoad, TensorStore: of 32 bytes of global memory, those that lie in the tensor
  int destinations = 1;      // TensorLoad: blocks that a multicast reaches
  int eviction = 0;          // TensorLoad: by its cache hint, first (-1) or last (1)
  int n = 0, k = 0;          // Product: columns, depth; rows are the warp's 16
  int sums = 0;              // Product: first register of its sums
  bool a_in_registers = false;
  u64 address = 0;           // TensorLoad, TensorStore: global address of the box's first byte in the tensor
  // TensorLoad, TensorStore: calls with address and bytes of each row in the tensor
  std::function<void(const std::function<void(u64, u32)>&)> rows;
  Access access;             // Copy
};

struct Wait {  // why a warp cannot go on
  enum class Kind : u8 { None, Barrier, TransactionBarrier, Copies, Products, TensorStores, ClusterBarrier, Registers };
  Kind kind = Kind::None;
  u32 index = 0;   // Barrier: its number; TransactionBarrier: shared address in the cluster
  u32 phase = 0;   // Barrier: generation that must have passed; TransactionBarrier: parity; Copies, Products: groups
                   // that may be left
};

constexpr u32 NEVER_ARRIVED = 0xffffffff;

struct Warp {
  Lanes r[256];
  u32 u[64];
  u32 p[8];        // a bit for each lane; p[7] is all ones
  bool up[8];      // up[7] is true
  u32 convergence[16][LANES];  // B0…B15: the lanes that each lane meets there; lanes apart may use one for two meetings
  u32 arrived[16];

  int number = 0;          // in its block
  Block* block = nullptr;
  u32 alive = 0;           // lanes that have not exited
  u32 active = 0;          // lanes of the group that executes now
  u32 parked = 0;          // lanes that wait at BSYNC, WARPSYNC or BAR for others of the warp
  u32 deferred = 0;        // lanes that jumped back while others could go on: their turn comes after those
  u32 synced = 0;          // lanes that arrived at WARPSYNC or BAR
  bool together = true;    // all living lanes at `pc`
  int pc = 0;
  int lane_pc[LANES];
  Wait wait;
  std::vector<u8> local;   // [lane][bytes]

  // groups of asynchronous work, oldest first: how many of each have not landed; the last is still open
  std::deque<int> copies{0}, products{0}, tensor_stores{0};

  int registers = 0;           // per thread after setmaxnreg; 0 before it
  u32 cluster_arrived = 0;     // lanes that have arrived at barrier.cluster, in this generation of it
  u32 cluster_generation = NEVER_ARRIVED;  // of the last arrival

  bool done() const { return alive == 0; }
};

struct NamedBarrier {
  u32 arrived = 0;      // threads
  u32 expected = 0;     // 0: all threads of the block that have not exited
  u32 generation = 0;
};

struct Block {
  u32 index[3] = {0, 0, 0};
  u32 rank = 0;              // in its cluster
  Cluster* cluster = nullptr;
  std::vector<u8> shared;    // from shared address 0: what the driver keeps (sm_90), static, dynamic
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  int free_registers = 0;    // per thread of a warp, × warps: what setmaxnreg gave back and may be taken
  bool done() const {
    for (const Warp& w : warps)
      if (!w.done()) return false;
    return true;
  }
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  u32 generation = 0;  // of barrier.cluster
};

struct Launch {
  u32 grid[3] = {1, 1, 1};
  u32 threads[3] = {1, 1, 1};
  u32 cluster[3] = {1, 1, 1};
  u32 shared_bytes = 0;     // static and dynamic
  u32 reserved_shared = 0;  // before them: 1024 on sm_90
  u32 local_bytes = 0;      // per thread
  u32 registers = 0;        // per thread
  u32 arch = 90;
};

constexpr u64 MODEL_PRODUCTS = 4000;  // of warps, that a model forms

// Everything a step may touch. One per run.
struct Machine {
  const Program* program = nullptr;
  Launch launch;
  GlobalMemory memory;
  std::vector<u8> banks[8];  // constant memory
  u64 seed = 0;
  // Blocks that a model's one stands for: each adds as often to a counter in global memory as this one does, so that a
  // persistent block finds the tiles it was given by an atomic add so far apart.
  u32 alike = 1;
  // Products of matrices that are formed; behind them sums stay as they are, which a model can do with: what a kernel
  // does hardly depends on them.
  u64 products_left = ~0ull;
  virtual ~Machine() = default;
  // begins asynchronous work; lands it now or later
  virtual void begin(Completion&&) = 0;
  // SR_CLOCK, SR_GLOBALTIMER
  virtual u64 clock() { return 0; }
};

// One step: the machine, the warp, and what the step leaves for the one who asked for it.
struct Context {
  Machine& machine;
  Warp& warp;
  u32 lanes = 0;          // that execute: active and with a true guard
  Access access;          // set by memory instructions
  int jump = -1;          // set by branches, for the lanes in `jumping`
  u32 jumping = 0;
  Lanes jump_lanes;       // where each jumping lane goes, if `jump` is -2
  u32 finished = 0;       // lanes that exit
  bool parked = false;    // the lanes stay here until others arrive (BSYNC, WARPSYNC)
};

// Makes the blocks of the cluster that holds block `first` (its number in the grid, x running fastest), warps ready.
std::unique_ptr<Cluster> make_cluster(Machine&, u64 first);

// True while the warp's wait is not over; clears it when it is.
bool is_waiting(Machine&, Warp&);

// Runs one instruction of the warp's next group of lanes. Throws Fault. `context.access` says what it touched.
Step step(Context&);

// The index of the instruction that `step` would run next; also picks the group of lanes. -1 when the warp has ended.
int next(Warp&);

// Operands: lanes of a 32-bit source with its modifiers applied, as an integer or as a float.
const Lanes& integer(Context&, const Operand&, Lanes& scratch);
const Lanes& floating(Context&, const Operand&, Lanes& scratch);
// The same of the second register of a pair (R4 → R5, c[…][0x160] → 0x164, RZ and immediates → 0).
const Lanes& upper(Context&, const Operand&, Lanes& scratch);
// The bits alone: no modifier applied, as 64-bit operands and halves need them.
const Lanes& plain(Context&, const Operand&, Lanes& scratch);
u32 predicate(Context&, const Operand&);              // a bit for each lane
void write(Context&, const Operand&, const Lanes&, int plus = 0);  // registers (by lane) or a uniform register (lane 0)
void write_predicate(Context&, const Operand&, u32 bits);
u32 uniform(Context&, const Operand&);                // of a uniform register, constant or immediate
u32 constant(Context&, int bank, u32 offset);

// Lanes that wait at convergence barrier `index` (or, with -1, at WARPSYNC) and need wait no longer go on behind it.
void release(Warp&, int index);
// True if BAR's named barrier has all it waits for; then its generation passes.
void check_barrier(Block&, int index);

// Whether the instruction works on uniform registers (UIADD3, …): its lanes are one.
inline float as_float(u32 bits) { float f; std::memcpy(&f, &bits, 4); return f; }
inline u32 as_bits(float f) { u32 b; std::memcpy(&b, &f, 4); return b; }

}  // namespace sass
