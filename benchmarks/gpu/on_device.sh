#!/bin/sh
# Runs a command on a GPU machine that has torch and nvcc but neither TileLang nor this workspace installed:
#   benchmarks/gpu/on_device.sh conformance [pytest options]     the conformance suite of the provider nvidia
#   benchmarks/gpu/on_device.sh python3 benchmarks/gpu/ops.py    anything else, with the packages importable
# .kit/tilelang.tar.xz (docs/kernels.md says how to make it) is unpacked outside the checkout.
set -eu
site=${TMPDIR:-/tmp}/deepinfer-site
if [ ! -d "$site" ]; then
    mkdir -p "$site/deepinfer_kernels_nvidia-0.dist-info"
    tar -xJf .kit/tilelang.tar.xz -C "$site"
    # The entry point by which the engine finds the provider.
    printf 'Metadata-Version: 2.1\nName: deepinfer-kernels-nvidia\nVersion: 0\n' >"$site/deepinfer_kernels_nvidia-0.dist-info/METADATA"
    printf '[deepinfer.kernels]\nnvidia = deepinfer_kernels_nvidia:provider\n' >"$site/deepinfer_kernels_nvidia-0.dist-info/entry_points.txt"
fi
export PYTHONPATH="$PWD:$PWD/packages/deepinfer-core/src:$PWD/packages/deepinfer-kernels-nvidia/src:$site"
export PYTHONDONTWRITEBYTECODE=1 TILELANG_PRINT_ON_COMPILATION=0
if [ "$1" = conformance ]; then
    shift
    exec python3 -m pytest -c /dev/null -p deepinfer_core.kernels.conformance.plugin --provider nvidia -q \
        -p no:cacheprovider --pyargs deepinfer_core.kernels.conformance "$@"
fi
exec "$@"
