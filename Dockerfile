# A server: slim Python, torch, and the wheel that CI has made (docs/ci.md).
#
#   docker build --tag server .
#   docker run --gpus all server
#
# What it does not contain: a compiler, Python's headers, the CUDA toolkit, CuTe DSL, TVM-FFI, or any
# package of this project's `build` extra. The NVIDIA driver comes from the host. torch brings
# libraries of its own, Triton among them; sonata-aot imports none of them but torch.
FROM python:3.12-slim

# Any build for CUDA 12 or 13. In a layer of its own: it is large, and changes least often.
ARG TORCH=torch==2.13.0
RUN pip install --no-cache-dir "$TORCH"

# Of the wheels in dist/ the one for this Python; from there alone, so no other version can slip in.
# `verify` needs no GPU: an image with damaged machine code is not made.
RUN --mount=type=bind,source=dist,target=/dist \
    pip install --no-cache-dir "click>=8.1" "platformdirs>=4" && \
    pip install --no-cache-dir --no-index --find-links /dist sonata-aot && \
    sonata-aot verify

# What the container runtime takes from the host; `compute` has libcuda.so.1.
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

RUN useradd --create-home server
USER server
WORKDIR /home/server

# Put the server here.
CMD ["sonata-aot", "doctor"]
