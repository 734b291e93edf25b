"""The shim of a rank: who am I, bind, verify, receipt, exec."""
