#!/bin/sh
# Runs the tests on an NVIDIA GPU, or with `pack` packs what they need; docs/CONTRIBUTING.md describes it.
cd "$(dirname "$0")/../.." || exit 1
case " $* " in
*" pack "* | *" --dry-run "*) python=.venv/bin/python ;;
*) [ -d build/gpu-pack ] || [ ! -x .venv/bin/python ] && python=python3 || python=.venv/bin/python ;;
esac
exec "${PYTHON:-$python}" tests/gpu/run.py "$@"
