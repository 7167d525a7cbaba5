// Launches through the C interface of the simulator's shared object, which is built apart and loaded by path.
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "prefill.h"

namespace vllm_ext {
namespace {

struct Simulator {
    void* (*open)(const char* chip, int threads) = nullptr;
    void (*close)(void* session) = nullptr;
    void (*region)(void* session, const char* name, void* begin, uint64_t size, int mode, int written) = nullptr;
    int (*launch)(void* session, const char* kernel, uint32_t blocks, uint8_t* const* arguments, char* error,
                  uint64_t error_size) = nullptr;
    int (*check_outputs)(void* session, char* error, uint64_t error_size) = nullptr;
    int threads = 1;
};

std::mutex guard;                       // held by a whole launch; calls take turns
std::map<std::string, Simulator> simulators;   // by --npu-arch
thread_local const Simulator* running = nullptr;
thread_local void* session = nullptr;   // of the call under way in this thread
thread_local char error[4096];

template <typename Function>
void Find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (!function) throw std::runtime_error(std::string("simulator: no symbol ") + name);
}

void CloseSession() {
    if (session) running->close(session);
    session = nullptr;
}

const char* Fail() {
    CloseSession();
    return error;
}

}  // namespace

void LoadSimulator(const std::string& arch, const std::string& path, int64_t threads) {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) throw std::runtime_error(std::string("simulator: ") + dlerror());
    Simulator loaded;
    Find(library, "sim_open", loaded.open);
    Find(library, "sim_close", loaded.close);
    Find(library, "sim_region", loaded.region);
    Find(library, "sim_launch", loaded.launch);
    Find(library, "sim_check_outputs", loaded.check_outputs);
    loaded.threads = static_cast<int>(threads);
    std::lock_guard<std::mutex> lock(guard);
    simulators[arch] = loaded;
}

// A call's launches share a session: what an earlier one wrote, a later one may read.
const char* LaunchSimulated(const LaunchRequest& request) {
    std::lock_guard<std::mutex> lock(guard);
    const auto found = simulators.find(ArchOf(request.chip));
    if (found == simulators.end())
        return "CPU tensors run on the simulator, and none is loaded for this chip: call load_simulator of "
               "vllm_ext.ops.linear_attention.npu.prefill";
    const Simulator& simulator = found->second;
    if (request.index == 0) {
        CloseSession();
        running = &simulator;
        session = simulator.open(request.chip, simulator.threads);
        if (!session) return "no simulated chip of this name";
        for (const Argument& argument : request.arguments)
            if (argument.data && argument.bytes && argument.use != Use::kTable)
                simulator.region(session, argument.name, argument.data, argument.bytes, static_cast<int>(argument.use), 0);
    }
    uint8_t* addresses[kArguments];
    for (int i = 0; i < kArguments; ++i) addresses[i] = static_cast<uint8_t*>(request.arguments[i].data);
    const char* kernel = request.op == Op::kGdn ? "gdn_prefill" : "kda_prefill";
    if (simulator.launch(session, kernel, request.blocks, addresses, error, sizeof error)) return Fail();
    if (request.index + 1 == request.count) {
        if (simulator.check_outputs(session, error, sizeof error)) return Fail();
        CloseSession();
    }
    return nullptr;
}

}  // namespace vllm_ext
