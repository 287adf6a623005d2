#!/usr/bin/env bash
# torch_range.sh VERSION...: the tests that need torch most, with each of these releases of PyTorch in place of .venv's.
#
# A release is installed beside .venv, from which everything else comes, into a folder that is removed again: it takes 5 GB.
# Goes on after a failure; ends with 1 if a release failed. Arguments for pytest, in place of the files below, in ARGS.
set -uo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
files=(tests/python tests/e2e/test_{collectives,ddp,features,early,staging,pieces,sharded,sharded_feedback,composition,elastic,reconfigured,failures,pitfalls,options,tolerant_features,tolerant_options,whole_group}.py)
[ -z "${ARGS:-}" ] || read -ra files <<<"$ARGS"

beside=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
failed=()
for version in "$@"; do
    rm -rf "$folder/venv"
    .venv/bin/python -m venv "$folder/venv" || exit 2
    own=$("$folder/venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    echo "import site; site.addsitedir('$beside')" >"$own/beside.pth"
    # shellcheck disable=SC2086  flags are words
    "$folder/venv/bin/python" -m pip install ${PIP_FLAGS:-} --quiet --no-cache-dir "torch==$version" || exit 2
    echo "=== torch $("$folder/venv/bin/python" -c 'import torch; print(torch.__version__)')"
    "$folder/venv/bin/python" -m pytest -q -p no:cacheprovider --basetemp "$folder/tests" "${files[@]}" || failed+=("$version")
done
[ ${#failed[@]} = 0 ] || { echo "failed with torch ${failed[*]}"; exit 1; }
