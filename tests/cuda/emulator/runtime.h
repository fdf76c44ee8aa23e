// The part of CUDA's runtime that pyserve uses, emulated.
#pragma once
#include "engine.h"
