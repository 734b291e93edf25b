#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
# Two nodes of four GPUs, each rank in a container. srun starts the ranks, so that they join Slurm's PMIx; the shim
# inside the container finds its rank, binds and verifies. Without a container: `lmsrun train.py` here does all of it.
set -eu
cd "${SLURM_SUBMIT_DIR:-$PWD}"
# srun returns the highest code of all tasks, also of those that it ended itself; here stands that of the first to fail.
export LMSRUN_FAILURE_FILE="$PWD/train-${SLURM_JOB_ID:-$$}.failed"
code=0
srun --cpu-bind=none --mem-bind=none --gpu-bind=none --mpi=pmix --kill-on-bad-exit=1 \
    apptainer exec --nv lmsrun.sif lmsrun worker -- python train.py || code=$?
if [ -s "$LMSRUN_FAILURE_FILE" ]; then
    code=$(cat "$LMSRUN_FAILURE_FILE")
    rm -f "$LMSRUN_FAILURE_FILE"
fi
exit "$code"
