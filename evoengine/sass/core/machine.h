// The decoded form of a SASS listing, and the state that its instructions work on: lanes, warps, blocks, clusters,
// memory.
//
// decode.cpp makes a Program of a listing; the files of opcodes (integer, floating, control, memory, matrix, async)
// give each instruction its `execute`; `step` runs one instruction of one warp; functional.cpp and timing.cpp decide
// which warp steps next and when asynchronous work lands.
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
#include <unordered_map>
#include <vector>

namespace sass {

using u8 = uint8_t;
using i8 = int8_t;
using u16 = uint16_t;
using i16 = int16_t;
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
  // clang-format off: a list of names
  enum class Kind : u8 {
    None, Register, Uniform, Predicate, UniformPredicate, Immediate, Constant, Memory, MatrixDescriptor, Label, Special,
    Barrier, Scoreboard, GroupScoreboard,
  };
  // clang-format on
  Kind kind = Kind::None;
  int index = -1;     // of the register, uniform register, predicate, barrier; of Memory and Constant the register
                      // in the brackets, -1 without one (RZ where it says RZ)
  int uniform = -1;   // Memory, Constant: the uniform register in the brackets
  int bank = 0;       // Constant: c[bank][…]
  int offset = 0;     // Memory, Constant: bytes
  u32 immediate = 0;  // bits, from the instruction's encoding
  bool negate = false, absolute = false, invert = false;
  bool wide = false;  // Memory: the register is one of a pair (R2.64)
  u8 scale = 1;       // Memory: R2.X4
  u8 part = 0;        // 0 whole; 1 H0_H0, 2 H1_H1, 3 H0_H1 (swapped); 4…7 B0…B3; 8 F32, of halves
  int target = -1;    // Label: index of the instruction
  std::string text;   // as the listing has it, modifiers off; Special: SR_TID.X
};

using Kind = Operand::Kind;

struct Context;
struct Instruction;
enum class Step : u8 {
  Done,     // the warp continues with the next instruction (or at the target of `jump`)
  Waiting,  // nothing was done: the instruction is repeated when Warp::wait is satisfied
};
using Execute = Step (*)(Context&, const Instruction&);
inline Step nothing(Context&, const Instruction&) { return Step::Done; }

// Whether an access is atomic or .STRONG, with the scope of its block or wider.
constexpr u8 BLOCK_STRONG = 1, GPU_STRONG = 2;

// The activity of a warp at a site, numbered as VisitKind of evoengine/devices/base.py.
enum class Visit : u8 { Wait, CopyWait, Product, Vote, None };

// Opcodes that others than their own `execute` ask for; Other is every further one.
// clang-format off: a list of names
#define SASS_OPS(X)                                                                                                  \
  X(Other) X(BAR) X(BRA) X(BRX) X(BRXU) X(CALL) X(CCTL) X(DEPBAR) X(EXIT) X(FENCE) X(HGMMA) X(IGMMA) X(ISETP) X(JMP) \
  X(JMX) X(MEMBAR) X(MOVM) X(QGMMA) X(RED) X(REDG) X(REDUX) X(RET) X(ST) X(STG) X(SYNCS) X(UBLKCP) X(UBLKPF)         \
  X(UBLKRED) X(UCGABAR_WAIT) X(UISETP) X(USETMAXREG) X(UTMACCTL) X(UTMACMDFLUSH) X(UTMALDG) X(UTMAPF) X(UTMAREDG)    \
  X(UTMASTG) X(WARPGROUP) X(WARPSYNC)
// clang-format on
#define SASS_OP(name) name,
enum class Op : u8 { SASS_OPS(SASS_OP) };
#undef SASS_OP

struct Instruction {
  int address = 0;                     // bytes from the start of the section
  std::string opcode;                  // HGMMA.64x128x16.F32
  Op op = Op::Other;                   // HGMMA
  std::vector<std::string> modifiers;  // behind the first dot
  std::string text;                    // the whole instruction, for messages
  std::vector<Operand> operands;
  u64 word[2] = {0, 0};  // its encoding

  int guard = PT;  // predicate before it
  bool guard_negated = false, guard_uniform = false;

  u8 strength = 0;              // of an access to memory: BLOCK_STRONG, GPU_STRONG
  bool optimistic = false;      // a load whose value is only compared, by an atomic behind it
  bool changes_global = false;  // stores to global memory, or changes it by an atomic
  bool acts = false;            // may change what other warps wait for; atomics say themselves whether they did
  Visit visit = Visit::None;
  u32 products = 1;          // of a matrix product: those of 8 × 8 × 4 that a warp forms
  double mma_work = 0;       // of mma.sync: clocks of the tensor core over those of an m16n8k16 of halves
  bool sparse = false;       // a matrix product of half of A's elements (.SP, which is no modifier here)
  bool second_half = false;  // HFMA2.MMA, which has a pipe for halfs of its own
  bool high = false;         // IMAD.HI
  bool fp16_sums = false;    // of mma.sync: at the rate of products whose sums are halves, or integers

  // control word (second 64-bit word, bits 41…61)
  u8 stall = 0, write_barrier = 7, read_barrier = 7, wait_mask = 0, reuse = 0;

  Execute execute = nullptr;  // null: unknown opcode, named in Program::unknown
  Pipe pipe = Pipe::None;
  // what an opcode's `prepare` reads out of modifiers for its `execute`; each opcode says what they mean
  int a = 0, b = 0, c = 0, d = 0;
};

// A product of a warpgroup.
inline bool is_group_product(const Instruction& i) {
  return i.op == Op::HGMMA || i.op == Op::QGMMA || i.op == Op::IGMMA;
}

struct Program {
  std::string entry;
  std::vector<Instruction> code;
  std::map<std::string, int> labels;
  std::map<std::string, int> unknown;  // opcode with modifiers → how often it stands there
  // architecture and registers of a thread → the first hazard, as a message; empty where there is none
  mutable std::map<std::pair<u32, u32>, std::string> hazards;
};

// Opcodes by name. `prepare` checks every modifier and sets `a`…`d`; it returns null for an unknown modifier.
struct Opcode {
  const char* name;  // without modifiers
  Pipe pipe;
  Execute (*prepare)(Instruction&);
};
// each file of opcodes has one of these, ended by a null name
extern const Opcode INTEGER[], FLOATING[], CONTROL[], MEMORY[], MATRIX[], ASYNC[];
extern const Opcode BITS[], MOVES[], WARPS[], DOUBLE[], HALF[], CONVERT[], ATOMIC[];

// Decodes the section of `entry` in an `nvdisasm -c -hex` listing. Throws Fault if there is none.
Program decode(std::string_view listing, std::string_view entry);

// True if the instruction has the modifier.
bool has(const Instruction&, std::string_view modifier);
// Removes a modifier from those not yet interpreted; true if it was there. Used by `prepare`: what remains at the end
// is unknown.
struct Modifiers {
  std::vector<std::string> left;
  explicit Modifiers(const Instruction& i) : left(i.modifiers) {}
  bool take(std::string_view name);
  bool none_left() const { return left.empty(); }
};

// ── memory ──────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Fault {  // what ends a run; `hung` where nothing could go on, `race` where nothing orders two accesses
  std::string message;
  bool hung = false, race = false;
  bool in_parallel = false;  // found where several threads ran clusters
};

struct Shadow;
struct Sparse;

// A piece of global memory. Contents repeat every `period` bytes if less is held than its length, as for a model, which
// reads drawn inputs of any size; writes to such a piece are dropped.
struct Allocation {
  u64 address = 0, bytes = 0;
  u8* data = nullptr;
  u64 period = 0;  // = bytes where all of it is held
  bool writable = false;
  std::string name;
  u8* written = nullptr;     // by words of four bytes: a bit for each byte stored to; null where nobody asks
  Shadow* shadow = nullptr;  // the last accesses; null where nobody asks
  Sparse* sparse = nullptr;  // its pages, where none of it is held (`period` is 0)
};

// The windows of the generic address space other than global memory; no allocation lies in them, and they follow the
// addresses that a process has for itself.
constexpr u64 SHARED_WINDOW = 0xff0000000000ull;  // + the shared address (the rank in its cluster in bits 24…)
constexpr u64 LOCAL_WINDOW = 0xfe0000000000ull;
constexpr u64 CONSTANT_WINDOW = 0xfd0000000000ull;  // + offset in bank 0: __grid_constant__ parameters

// Functions that the driver provides: printf and assert, at addresses outside memory. evoengine/sass/launch.py puts
// them into the constant bank from which code loads them.
constexpr u64 BUILTINS = 0xfc0000000000ull, BUILTIN_BYTES = 16, PROVIDED = 2;

struct GlobalMemory {
  std::vector<Allocation> allocations;                   // by address
  Allocation& find(u64 address, u32 bytes, bool write);  // throws Fault: outside all, or read-only
  void load(u64 address, void* to, u32 bytes);
  void store(u64 address, const void* from, u32 bytes);
  size_t last = 0;
};

// The effect of an instruction on memory, for the timing model.
struct Access {
  enum class Space : u8 { None, Shared, Global, Local, Constant };
  Space space = Space::None;
  bool store = false, atomic = false;
  bool asynchronous = false;  // LDGSTS: `addresses` are those it reads
  bool matrix = false;        // LDSM, STSM: each address is a row of 16 bytes
  bool cached = true;         // false: past the L1
  bool afar = false;          // Shared: of another block of the cluster
  int torn = 0;   // LDGSTS: sectors of global memory that do not land in 32 bytes of shared memory as they are
  int bytes = 4;  // per lane
  u32 lanes = 0;
  u64 addresses[LANES];
};

// ── state ───────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Warp;
struct Block;
struct Cluster;
struct Visits;

// Work that an instruction starts and that ends later: a copy landing, a tensor product. `land` completes it; the
// caller decides when, but in order within one `queue` of one warp.
struct Completion {
  enum class Queue : u8 { Copy, TensorLoad, TensorStore, Product };
  Queue queue = Queue::Copy;
  Warp* warp = nullptr;
  std::function<void()> land;
  // for timing
  int bytes = 0;          // Copy, TensorLoad, TensorStore: in all; Product: read from shared memory
  int sectors = 0;        // TensorLoad, TensorStore: of 32 bytes of global memory, those that lie in the tensor
  int destinations = 1;   // TensorLoad: blocks that a multicast reaches
  int eviction = 0;       // TensorLoad: by its cache hint, first (-1) or last (1)
  bool combines = false;  // TensorStore: with what is there
  int n = 0;              // Product: columns; rows are the warp's 16, and it is 32 bytes deep
  bool a_in_registers = false;
  u64 address = 0;  // TensorLoad, TensorStore: global address of the box's first byte in the tensor
  // TensorLoad, TensorStore: calls with address and bytes of each row in the tensor
  std::function<void(const std::function<void(u64, u32)>&)> rows;
  Access access;  // Copy
};

struct Wait {  // why a warp cannot go on
  enum class Kind : u8 { None, Barrier, TransactionBarrier, Copies, Products, TensorStores, ClusterBarrier, Registers };
  Kind kind = Kind::None;
  u32 index = 0;  // Barrier: its number; TransactionBarrier: shared address in the cluster
                  // Copies, TensorStores: the scoreboard
  u32 phase = 0;  // Barrier: generation that must have passed; TransactionBarrier: parity; Copies, Products: groups
                  // that may be left
};

constexpr u32 NEVER_ARRIVED = 0xffffffff;

class Order;

// Groups of asynchronous work of one kind, oldest first: how many pieces of each have not landed, and the scoreboard
// that tells of it. The last is still open.
struct Groups {
  struct Group {
    int left = 0;
    u32 scoreboard = 0;
  };
  std::deque<Group> all{Group{}};
  u32 closed = 0;         // ever
  std::deque<u8> recent;  // scoreboards of the last to be closed

  void add() { all.back().left++; }
  void close(u32 scoreboard) {
    all.back().scoreboard = scoreboard;
    all.emplace_back();
    closed++;
    recent.push_back(u8(scoreboard));
    if (recent.size() > 256) recent.pop_front();
  }
  // The oldest piece has landed.
  void land() {
    while (all.size() > 1 && !all.front().left) all.pop_front();
    all.front().left--;
  }
  // Closed groups of the scoreboard that have not landed whole.
  int open(u32 scoreboard) const {
    int count = 0;
    bool landed = true;
    for (size_t n = 0; n + 1 < all.size(); n++) {
      landed &= !all[n].left;
      count += !landed && all[n].scoreboard == scoreboard;
    }
    return count;
  }
  // How many groups have landed once no more than `left` of the scoreboard's have not.
  u32 landed(u32 scoreboard, u32 left) const {
    for (size_t n = recent.size(); n-- > 0;)
      if (recent[n] == scoreboard && left-- == 0) return closed - u32(recent.size() - 1 - n);
    return 0;
  }
};

enum class Reduced : u8 { Count, And, Or };  // of a predicate, by BAR.RED

struct Warp {
  Lanes r[256];
  u32 u[64];
  u32 p[8];                    // a bit for each lane; p[7] is all ones
  bool up[8];                  // up[7] is true
  u32 convergence[16][LANES];  // B0…B15: the lanes that each lane meets there; lanes apart may use one for two meetings
  u32 arrived[16];

  int number = 0;  // in its block
  Block* block = nullptr;
  u32 alive = 0;         // lanes that have not exited
  u32 active = 0;        // lanes of the group that executes now
  u32 parked = 0;        // lanes that wait at BSYNC, WARPSYNC or BAR for others of the warp
  u32 deferred = 0;      // lanes that jumped back while others could go on: their turn comes after those
  u32 synced = 0;        // lanes that arrived at WARPSYNC or BAR
  bool together = true;  // all living lanes at `pc`
  int pc = 0;
  int lane_pc[LANES];
  Wait wait;
  std::vector<u8> local;  // [lane][bytes]

  Groups copies, products, tensor_stores;

  // Where `strict`, lanes that were apart run together again only where the program says so, as on hardware. Lanes
  // that run together are a group, named by its first lane.
  bool strict = false;
  u8 leader[LANES] = {};      // of each lane's group
  int group = -1;             // that runs; -1 where another may be drawn
  u32 draw = 1;               // state of the generator that draws groups
  u32 at_barrier = 0;         // lanes that wait at BAR for the others of the warp
  u32 sync_mask[LANES] = {};  // the lanes that each lane meets at WARPSYNC

  int registers = 0;                       // per thread after setmaxnreg; 0 before it
  Reduced reduced = Reduced::Count;        // by the last BAR.RED
  u32 reduction = 0;                       // what that found, for B2R
  u32 cluster_arrived = 0;                 // lanes that have arrived at barrier.cluster, in this generation of it
  u32 cluster_generation = NEVER_ARRIVED;  // of the last arrival

  bool done() const { return alive == 0; }
};

struct NamedBarrier {
  u32 arrived = 0;   // threads
  u32 expected = 0;  // 0: all threads of the block that have not exited
  u32 generation = 0;
  u32 true_ones = 0;                    // BAR.RED: of the threads that have arrived
  u32 counted = 0, arrived_before = 0;  // of those that passed last: true ones, all
};

struct Block {
  u32 index[3] = {0, 0, 0};
  u32 rank = 0;  // in its cluster
  Cluster* cluster = nullptr;
  std::vector<u8> shared;  // from shared address 0: what the driver keeps (sm_90), static, dynamic
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  int free_registers = 0;  // per thread of a warp, × warps: what setmaxnreg gave back and may be taken
  bool done() const {
    for (const Warp& w : warps)
      if (!w.done()) return false;
    return true;
  }
};

struct Cluster {
  std::vector<std::unique_ptr<Block>> blocks;
  u32 generation = 0;      // of barrier.cluster
  u64 first = 0;           // number of its first block in the grid
  Order* order = nullptr;  // what accesses are ordered; null where nobody asks
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
  u32 barriers = 16;    // named barriers that the binary declares
  u32 mbarriers = ~0u;  // instructions that initialise an mbarrier, as it declares them
  u32 sms = 1;          // SMs that the kernel can read of; a right kernel does not depend on their number
};

constexpr u64 MODEL_PRODUCTS = 4000;  // of warps, that a model forms
constexpr u64 ALL_PRODUCTS = ~0ull;

// What a cluster adds to a counter in global memory by atomics whose results it takes.
struct Added {
  u64 sum = 0;
  int times = 0;
};

// Everything a step may touch. One per run.
struct Machine {
  const Program* program = nullptr;
  Launch launch;
  GlobalMemory memory;
  std::vector<u8> banks[8];  // constant memory
  u64 seed = 0;
  std::string printed;       // by printf
  u64 acts = 0;              // how often something was done that another warp may wait for
  Visits* visits = nullptr;  // null where nobody counts
  // Blocks that a model's one stands for: each adds as often to a counter in global memory as this one does, so that a
  // persistent block finds the tiles it was given by an atomic add so far apart.
  u32 alike = 1;
  std::map<u64, Added>* added = nullptr;  // by address, what is added to counters; null where nobody asks
  // Products of matrices that are formed; behind them sums stay as they are, which a model can do with: what a kernel
  // does hardly depends on them.
  u64 products_left = ALL_PRODUCTS;
  bool is_model() const { return products_left != ALL_PRODUCTS; }
  // Whether the next product is formed.
  bool takes_product() { return !is_model() || (products_left && products_left--); }
  virtual ~Machine() = default;
  // begins asynchronous work; lands it now or later
  virtual void begin(Completion&&) = 0;
  // Has the stores of tiles and of bytes from shared memory write that have begun and not landed.
  virtual void land_stores() {}
  // Has another block of the warp's cluster see what it does.
  virtual void send(Warp&, std::function<void()> act) { act(); }  // NOLINT(performance-*): a model keeps it
  // SR_CLOCK, SR_GLOBALTIMER
  virtual u64 clock() { return 0; }
};

// What the warps of the blocks that run have done at sites.
struct Visits {
  struct Count {
    u64 all = 0, came_true = 0;
  };
  struct Site {
    const Warp* warp;
    u64 number;
    Visit kind;
    bool operator==(const Site&) const = default;
  };
  struct Hash {
    size_t operator()(const Site& s) const {
      return (size_t(s.warp) >> 6 ^ s.number << 3 ^ size_t(s.kind)) * 0x9e3779b97f4a7c15ull >> 20;
    }
  };
  std::unordered_map<Site, Count, Hash> counts;

  void add(const Warp& warp, Visit kind, u64 number, bool came_true = false, u32 times = 1) {
    Count& count = counts[{&warp, number, kind}];
    count.all += times;
    count.came_true += came_true;
  }
};

constexpr int NOWHERE = -1, AT_WARPSYNC = 16, AT_BAR = 17;

// One step: the machine, the warp, and what the step leaves for the one who asked for it.
struct Context {
  Machine& machine;
  Warp& warp;
  u32 lanes = 0;  // that execute: active and with a true guard
  Access access;  // set by memory instructions
  int jump = -1;  // set by branches, for the lanes in `jumping`
  u32 jumping = 0;
  Lanes jump_lanes;      // where each jumping lane goes, if `jump` is -2
  u32 finished = 0;      // lanes that exit
  int parked = NOWHERE;  // where the lanes stay until others arrive: a convergence barrier, AT_WARPSYNC, AT_BAR
  bool looked = false;   // looked for what has not come yet: others should run now
};

// Makes the blocks of the cluster that holds block `first` (its number in the grid, x running fastest), warps ready.
std::unique_ptr<Cluster> make_cluster(Machine&, u64 first);

// True while the warp's wait is not over; clears it when it is.
bool is_waiting(Machine&, Warp&);

// The warp's active lanes whose guard is true, for the instruction at `pc`.
u32 lanes_to_execute(const Warp&, const Instruction&);

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
u32 predicate(Context&, const Operand&);                           // a bit for each lane
void write(Context&, const Operand&, const Lanes&, int plus = 0);  // registers (by lane) or a uniform register (lane 0)
void write_predicate(Context&, const Operand&, u32 bits);
u32 uniform(Context&, const Operand&);  // of a uniform register, constant or immediate
u32 constant(Context&, int bank, u32 offset);

// Lets lanes go on that wait at a convergence barrier, AT_WARPSYNC or AT_BAR for others that have arrived or ended.
void release(Warp&, int where);
// Passes the generation of a named barrier that has all it waits for.
void check_barrier(Block&, int index);

inline float as_float(u32 bits) {
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
inline u32 as_bits(float f) {
  u32 b;
  std::memcpy(&b, &f, 4);
  return b;
}

}  // namespace sass
