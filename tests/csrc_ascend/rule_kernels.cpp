// Small kernels for the tests of the simulator: some with results worked out by hand, one for each rule it enforces.
#include "buffer_rules.h"
#include "global_memory_rules.h"
#include "instruction_rules.h"
#include "order_rules.h"
#include "parameter_rules.h"
#include "right_kernels.h"
