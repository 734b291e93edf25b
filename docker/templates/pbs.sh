#!/bin/bash
#PBS -N train
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l place=scatter:excl
#PBS -l walltime=01:00:00
#PBS -j oe
# Two nodes of four GPUs; lmsrun reads PBS_NODEFILE and starts the ranks by the mpirun in PATH.
set -eu
cd "${PBS_O_WORKDIR:-$PWD}"
exec lmsrun run train.py
