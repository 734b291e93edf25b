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
exec srun --cpu-bind=none --mem-bind=none --gpu-bind=none --mpi=pmix --kill-on-bad-exit=1 \
    apptainer exec --nv lmsrun.sif lmsrun worker -- python train.py
