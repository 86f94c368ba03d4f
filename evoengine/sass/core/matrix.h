#pragma once

#include "machine.h"

namespace sass {

Execute prepare_group_product(Instruction&);  // HGMMA

}  // namespace sass
