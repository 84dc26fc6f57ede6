//go:build linux

#include "textflag.h"

// func clone(args *cloneArgs, size, start, status, fail uint64) (ret int64)
//
// The parent gets what clone3 returned. The child walks the ops from start on: it uses no stack and does not return.
// The layout of an op is stated in op.go. The kernel preserves all registers but R0, the child's state is in:
//
//	R19  the op
//	R20  where a failure is stored
//	R21  the ops to go on with after a fatal failure
TEXT ·clone(SB),NOSPLIT|NOFRAME,$0-48
	MOVD	args+0(FP), R0
	MOVD	size+8(FP), R1
	MOVD	start+16(FP), R19
	MOVD	status+24(FP), R20
	MOVD	fail+32(FP), R21
	MOVD	$435, R8 // clone3
	SVC
	CBZ	R0, walk
	MOVD	R0, ret+40(FP)
	RET

	// Child: in its new namespaces, maybe on the parent's memory, with the parent's stack under it.
walk:
	MOVD	88(R19), R9 // flags
	MOVD	8(R19), R0
	TBZ	$8, R9, arg1
	MOVD	(R0), R0
arg1:
	MOVD	16(R19), R1
	TBZ	$9, R9, arg2
	MOVD	(R1), R1
arg2:
	MOVD	24(R19), R2
	TBZ	$10, R9, arg3
	MOVD	(R2), R2
arg3:
	MOVD	32(R19), R3
	TBZ	$11, R9, arg4
	MOVD	(R3), R3
arg4:
	MOVD	40(R19), R4
	TBZ	$12, R9, arg5
	MOVD	(R4), R4
arg5:
	MOVD	48(R19), R5
	TBZ	$13, R9, call
	MOVD	(R5), R5
call:
	MOVD	0(R19), R8
	SVC
	CMN	$4095, R0
	BCS	failed // unsigned >= -4095
	MOVD	56(R19), R10 // to
	CBZ	R10, stored
	MOVD	R0, (R10)
stored:
	TBZ	$0, R9, zero // flagSlash
	MOVD	8(R19), R10
	MOVBU	(R10), R11
	CMP	$47, R11
	BEQ	zero
	MOVD	$-2, R0 // ENOENT
	B	failed
zero:
	MOVD	72(R19), R10
	CBZ	R10, next
	CBNZ	R0, next
	MOVD	R10, R19
	B	walk
next:
	ADD	$96, R19, R19
	B	walk

failed:
	NEG	R0, R0
	MOVD	R0, 16(R20)
	MOVD	64(R19), R10 // alt
	CBZ	R10, fatal
	MOVD	80(R19), R11 // only
	CBZ	R11, alt
	CMP	R0, R11
	BNE	fatal
alt:
	MOVD	R10, R19
	B	walk
fatal:
	MOVD	R0, 0(R20)
	MOVD	R19, 8(R20)
	MOVD	R21, R19
	B	walk

// func walkAddr() uint64
TEXT ·walkAddr(SB),NOSPLIT|NOFRAME,$0-8
	MOVD	$·clone(SB), R0
	MOVD	R0, ret+0(FP)
	RET
