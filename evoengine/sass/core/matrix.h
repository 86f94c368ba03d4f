#pragma once

#include "machine.h"

namespace sass {

Execute prepare_group_product(Instruction&);  // HGMMA, QGMMA, IGMMA

}  // namespace sass
