# In a clone: spack repo add recipes/spack/spack_repo/lmsrun; spack dev-build py-lmsrun@0.1.0
from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyLmsrun(PythonPackage):
    """Start one bound Horovod process per GPU, and train TensorFlow models that do not fit in GPU memory."""

    license("Apache-2.0")

    version("0.1.0")

    variant("mpi", default=False, description="Ask MPI before a job whether it connects the hosts")

    depends_on("c", type="build")
    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:79", type="build")
    depends_on("py-psutil@5.9:", type=("build", "run"))
    depends_on("py-libnuma@1.2:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    depends_on("py-wrapt@1.14:", type=("build", "run"))
    depends_on("py-tomli@2:", when="^python@:3.10", type=("build", "run"))
    depends_on("py-mpi4py@3.1:", when="+mpi", type=("build", "run"))
    depends_on("numactl", type="run")
