#!/bin/bash
#BSUB -J train
#BSUB -nnodes 2
#BSUB -W 01:00
#BSUB -o %J.out
#BSUB -alloc_flags smt4
# Summit and its like: LSF with CSM. lmsrun finds the allocation and starts the ranks by jsrun, six a host.
set -eu
cd "${LS_SUBCWD:-$PWD}"
exec lmsrun run -np 12 --hosts "$(awk '{for (i = 3; i < NF; i += 2) printf "%s%s:6", (i > 3 ? "," : ""), $i}' \
    <<<"$LSB_MCPU_HOSTS")" train.py
