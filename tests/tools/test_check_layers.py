"""Which includes check_layers.py takes and which it refuses."""

from project import ProjectTest

import check_layers


class Layers(ProjectTest):
    def found(self, name, include):
        self.write(name, f"// A file.\n#include {include}\n")
        return check_layers.check(self.root)

    def test_takes_the_right_direction(self):
        for name, include in [
            ("src/core/plan.cpp", '"math/mask.h"'),
            ("src/core/registry.cpp", '"cpu/flash.h"'),
            ("src/cpu/flash.cpp", '"core/engine.h"'),
            ("src/ops/merge.cpp", '"te_attention_ops.h"'),
            ("src/nvte/fused.cpp", '"transformer_engine/fused_attn.h"'),
            ("src/hopper/forward.cu", "<cuda.h>"),
            ("include/te_attention_ops.h", '"te_attention.h"'),
            ("tests/core/test_plan.cpp", '"cpu/flash.h"'),
        ]:
            with self.subTest(name=name):
                self.assertEqual(self.found(name, include), [])

    def test_refuses_the_wrong_direction(self):
        for name, include in [
            ("src/math/mask.h", '"core/error.h"'),
            ("src/core/plan.cpp", '"cpu/flash.h"'),
            ("src/core/plan.cpp", '"nvte/tensor.h"'),
            ("src/cpu/flash.cpp", '"ops/merge.h"'),
            ("src/cpu/flash.cpp", '"hopper/plan.h"'),
            ("src/ops/merge.cpp", '"nvte/tensor.h"'),
            ("src/ops/merge.cpp", "<transformer_engine/softmax.h>"),
            ("src/core/device.cpp", "<cuda_runtime.h>"),
            ("src/extra/new.cpp", "<vector>"),
            ("include/te_attention.h", '"core/plan.h"'),
            ("examples/c_api.c", '"core/plan.h"'),
        ]:
            with self.subTest(name=name, include=include):
                problems = self.found(name, include)
                self.assertEqual(len(problems), 1, problems)
                self.assertTrue(problems[0].startswith(name), problems)
                (self.root / name).unlink()

    def test_reads_no_comment(self):
        self.write("src/math/a.h", '/* \n#include "core/plan.h"\n*/\n// #include "nvte/x.h"\n')
        self.assertEqual(check_layers.check(self.root), [])
