"""Ahead-of-time compilation for Hopper, without a GPU: what a function launches is compiled once, not run.

A driver that only names its target stands in for the real one, so the launch code itself decides types,
alignments and configurations: what is compiled here is what a GPU would be given.

    report("module:function")   in a subprocess without TRITON_INTERPRET -> one dict a kernel compiled:
        kernel, dtype (of the first tensor), constants, num_warps, num_stages, registers, stack, local (bytes
        a thread), shared (bytes a program), wgmma (how many in the PTX), seconds
"""
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARED_LIMIT = 227 * 1024   # bytes of shared memory that one program may have on sm_90
HERE = Path(__file__).resolve().parent


def report(launches: str):
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, __file__, launches], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def show(rows):
    for r in rows:
        constants = " ".join(f"{name}={value}" for name, value in r["constants"].items())
        print(f"{r['kernel']:18} {r['dtype']:5} warps {r['num_warps']} stages {r['num_stages']} "
              f"registers {r['registers']:3} stack {r['stack']} local {r['local']} shared {r['shared']:6} "
              f"wgmma {r['wgmma']:3}  {constants}  {r['seconds']:.1f} s")


class Hopper:
    """As much of a driver as compiling asks for."""
    def get_current_target(self):
        from triton.backends.compiler import GPUTarget
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_launches(launches: str):
    import triton
    from triton.runtime.jit import JITFunction
    run = JITFunction.run
    seen = []
    cuobjdump = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"

    def compile_only(self, *args, grid, warmup, **kwargs):
        start = time.perf_counter()
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        seconds = time.perf_counter() - start
        if any(kernel is known for known in seen):
            return kernel
        seen.append(kernel)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            Path(file.name).write_bytes(kernel.asm["cubin"])
            command = [cuobjdump, "-res-usage", file.name]
            usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage.split("Function")[1]))
        names = [p.name for p in self.params if p.is_constexpr]
        bound = dict(zip([p.name for p in self.params], args)) | kwargs
        dtype = next(str(x.dtype) for x in args if hasattr(x, "dtype")).removeprefix("torch.")
        dtype = dict(bfloat16="bf16", float16="fp16", float32="fp32").get(dtype, dtype)
        print(json.dumps(dict(kernel=self.__name__, dtype=dtype, constants={n: bound[n] for n in names},
                              num_warps=kernel.metadata.num_warps, num_stages=kernel.metadata.num_stages,
                              registers=int(used["REG"]), stack=int(used["STACK"]), local=int(used["LOCAL"]),
                              shared=kernel.metadata.shared, wgmma=kernel.asm["ptx"].count("wgmma.mma_async"),
                              seconds=seconds)), flush=True)
        return kernel

    triton.runtime.driver.set_active(Hopper())
    JITFunction.run = compile_only
    module, function = launches.split(":")
    getattr(importlib.import_module(module), function)()


if __name__ == "__main__":
    sys.path.append(str(HERE.parent))
    compile_launches(sys.argv[1])
