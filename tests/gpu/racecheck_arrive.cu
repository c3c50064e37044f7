// What racecheck says of the producer and consumer of the PTX manual: `nvcc -o race racecheck_arrive.cu`,
// `compute-sanitizer --tool racecheck ./race 1 2`. Nothing once through the buffer, a race the second time.
#include <cstdio>
#define ARRIVE(id, n) asm volatile("bar.arrive %0, %1;" ::"r"(id), "n"(n) : "memory")
#define SYNC(id, n) asm volatile("bar.sync %0, %1;" ::"r"(id), "n"(n) : "memory")
// The PTX manual's producer and consumer, `n` times over one buffer: barrier 1 says full, 2 says empty.
__global__ void one(int n, int *out) {
  __shared__ int buffer[32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sum = 0;
  if (warp == 0) {
    for (int i = 0; i < n; ++i) {
      if (i > 0) SYNC(2, 64);
      buffer[lane] = i + lane;
      ARRIVE(1, 64);
    }
  } else {
    for (int i = 0; i < n; ++i) {
      SYNC(1, 64);
      sum += buffer[31 - lane];
      if (i + 1 < n) ARRIVE(2, 64);
    }
    out[lane] = sum;
  }
}
// As the scan: two buffers, one producer, two consumers that take turns, barriers with a number for each.
__global__ void two(int n, int *out) {
  __shared__ int buffer[2][32];
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sum = 0;
  if (warp == 0) {
    for (int i = 0; i < n; ++i) {
      if (i >= 2) SYNC(2 + i % 2, 64);
      buffer[i % 2][lane] = i + lane;
      ARRIVE(4 + i % 2, 64);
    }
  } else {
    int turn = warp - 1;
    for (int i = turn; i < n; i += 2) {
      SYNC(4 + turn, 64);
      sum += buffer[turn][31 - lane];
      if (i + 2 < n) ARRIVE(2 + turn, 64);
    }
    out[turn * 32 + lane] = sum;
  }
}
int main(int argc, char **argv) {
  int *out; cudaMalloc(&out, 256); int n = atoi(argv[2]);
  if (argv[1][0] == '1') one<<<1, 64>>>(n, out); else two<<<1, 96>>>(n, out);
  printf("%s %d: %s\n", argv[1], n, cudaGetErrorString(cudaDeviceSynchronize()));
}
