"""Which includes and imports check_layers.py takes and which it refuses."""

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


class Imports(ProjectTest):
    def found(self, name, text):
        self.write(name, f'"""A module."""\n{text}\n')
        return check_layers.check(self.root)

    def test_takes_public_names(self):
        inside = "python/te_attention_transformer_engine/transformer_engine/pytorch/a.py"
        for name, text in [
            ("python/te_attention/torch/a.py", "from te_attention.torch._b import _c"),
            ("python/te_attention/a.py", "import transformers\nname = 'transformer_engine'"),
            (inside, "from te_attention import __version__, version"),
            (inside, "import te_attention.torch as t\nt.attention(t.__name__, x._y)"),
            (inside, "from transformer_engine._b import _c\nfrom ._d import _e"),
            (inside, "import transformer_engine_torch._b"),
        ]:
            with self.subTest(text=text):
                self.assertEqual(self.found(name, text), [])

    def test_refuses_the_compatibility_layer_below_it(self):
        name = "python/te_attention/torch/a.py"
        for text in [
            "import transformer_engine",
            "import transformer_engine.pytorch as te",
            "from transformer_engine_torch import DType",
            "from transformer_engine_jax.a import b",
            "from te_attention_transformer_engine import Finder",
            "def f():\n    import transformer_engine_torch",
            "from importlib import import_module\nte = import_module('transformer_engine.pytorch')",
        ]:
            with self.subTest(text=text):
                problems = self.found(name, text)
                self.assertEqual(len(problems), 1, problems)
                self.assertTrue(problems[0].startswith(name), problems)

    def test_refuses_private_names(self):
        name = "python/te_attention_transformer_engine/transformer_engine_torch/a.py"
        for line, text in [
            (2, "from te_attention import _library as core"),
            (2, "from te_attention.torch._library import OPS"),
            (2, "import te_attention.torch._prepared"),
            (2, "from te_attention.torch.functional import _run"),
            (3, "import te_attention.torch\nte_attention.torch._library.OPS.fill"),
            (3, "import te_attention.torch as t\nt._library"),
            (3, "from te_attention import torch\ndel torch._library"),
            (3, "import importlib\nimportlib.import_module('te_attention._library')"),
        ]:
            with self.subTest(text=text):
                problems = self.found(name, text)
                self.assertEqual(len(problems), 1, problems)
                self.assertTrue(problems[0].startswith(f"{name}:{line}: "), problems)
                self.assertIn("public name", problems[0])

    def test_knows_every_package(self):
        problems = self.found("python/other/a.py", "import os")
        self.assertEqual(len(problems), 1, problems)
        self.assertTrue(problems[0].startswith("python/other/a.py:1: other is no package"))
