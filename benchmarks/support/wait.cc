// Waits so many seconds after its operands are there, and returns zero: a call in a program that takes time, but no core.

#include <chrono>
#include <thread>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

static ffi::Error Wait(double seconds, ffi::RemainingArgs, ffi::ResultBufferR0<ffi::F32> zero) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
  *zero->typed_data() = 0;
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    wait_seconds, Wait,
    ffi::Ffi::Bind().Attr<double>("seconds").RemainingArgs().Ret<ffi::BufferR0<ffi::F32>>());
