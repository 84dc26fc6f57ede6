//go:build linux

#include "textflag.h"

// func clone(args *cloneArgs, size, start, status, fail uint64) (ret int64)
//
// The parent gets what clone3 returned. The child walks the ops from start on: it uses no stack and does not return.
// The layout of an op is stated in op.go. Registers that the kernel preserves hold the child's state:
//
//	BX   the op
//	R12  where a failure is stored
//	R13  the ops to go on with after a fatal failure
TEXT ·clone(SB),NOSPLIT|NOFRAME,$0-48
	MOVQ	args+0(FP), DI
	MOVQ	size+8(FP), SI
	MOVQ	start+16(FP), BX
	MOVQ	status+24(FP), R12
	MOVQ	fail+32(FP), R13
	MOVL	$435, AX // clone3
	SYSCALL
	TESTQ	AX, AX
	JEQ	walk
	MOVQ	AX, ret+40(FP)
	RET

	// Child: in its new namespaces, maybe on the parent's memory, with the parent's stack under it.
walk:
	MOVQ	88(BX), CX // flags
	MOVQ	8(BX), DI
	TESTL	$0x100, CX
	JEQ	arg1
	MOVQ	(DI), DI
arg1:
	MOVQ	16(BX), SI
	TESTL	$0x200, CX
	JEQ	arg2
	MOVQ	(SI), SI
arg2:
	MOVQ	24(BX), DX
	TESTL	$0x400, CX
	JEQ	arg3
	MOVQ	(DX), DX
arg3:
	MOVQ	32(BX), R10
	TESTL	$0x800, CX
	JEQ	arg4
	MOVQ	(R10), R10
arg4:
	MOVQ	40(BX), R8
	TESTL	$0x1000, CX
	JEQ	arg5
	MOVQ	(R8), R8
arg5:
	MOVQ	48(BX), R9
	TESTL	$0x2000, CX
	JEQ	call
	MOVQ	(R9), R9
call:
	MOVQ	0(BX), AX
	SYSCALL
	CMPQ	AX, $-4095
	JCC	failed
	MOVQ	56(BX), CX // to
	TESTQ	CX, CX
	JEQ	stored
	MOVQ	AX, (CX)
stored:
	TESTL	$1, 88(BX) // flagSlash
	JEQ	zero
	MOVQ	8(BX), CX
	CMPB	(CX), $47
	JEQ	zero
	MOVQ	$-2, AX // ENOENT
	JMP	failed
zero:
	MOVQ	72(BX), CX
	TESTQ	CX, CX
	JEQ	next
	TESTQ	AX, AX
	JNE	next
	MOVQ	CX, BX
	JMP	walk
next:
	ADDQ	$96, BX
	JMP	walk

failed:
	NEGQ	AX
	MOVQ	AX, 16(R12)
	MOVQ	64(BX), CX // alt
	TESTQ	CX, CX
	JEQ	fatal
	MOVQ	80(BX), DX // only
	TESTQ	DX, DX
	JEQ	alt
	CMPQ	DX, AX
	JNE	fatal
alt:
	MOVQ	CX, BX
	JMP	walk
fatal:
	MOVQ	AX, 0(R12)
	MOVQ	BX, 8(R12)
	MOVQ	R13, BX
	JMP	walk

// func walkAddr() uint64
TEXT ·walkAddr(SB),NOSPLIT|NOFRAME,$0-8
	MOVQ	$·clone(SB), AX
	MOVQ	AX, ret+0(FP)
	RET
