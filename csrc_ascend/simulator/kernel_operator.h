// The header a kernel includes. With CANN the vendor's header of this name is found; on a host it is this one.
#pragma once
#include "cube.h"
#include "data_copy.h"
#include "sync.h"
#include "vector.h"
